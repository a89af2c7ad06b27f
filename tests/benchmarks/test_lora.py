"""The comparison of LoRA with full training: its runs, its restart, its arithmetic."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import lora
from benchmarks.lora import runs_of
from configs.paravt_tiny import paravt_tiny
from models.lora import LoRASettings
from tests.train.small import small
from train.prepare import prepare


def test_both_arms_begin_with_the_same_weights_and_differ_in_what_is_trained_and_how_fast():
    start, full, adapted = runs_of("out", 5).values()
    assert start.rl is None and start.world is not None and start.text is not None
    assert start.seed == start.world.seed == start.text.seed == 5
    assert full.model.path == adapted.model.path == f"{start.run_dir}/model"
    assert full.align is full.sft is full.lora is None
    tiny = paravt_tiny().rl
    assert tiny is not None and adapted.rl is not None
    assert full.rl == tiny
    rate = dataclasses.replace(tiny.optimizer, learning_rate=5e-4)
    assert adapted.rl.optimizer == rate
    same = dataclasses.replace(adapted, name="", run_dir="", lora=None, rl=full.rl)
    assert same == dataclasses.replace(full, name="", run_dir="")


@pytest.mark.slow
def test_memory_counts_the_arrays_with_which_rl_starts(tmp_path):
    data = prepare(small(), tmp_path)
    whole = lora.memory(small(), data)
    adapted = lora.memory(dataclasses.replace(small(), lora=LoRASettings(rank=4)), data)
    arrays = "decoder, optimizer and reference, MiB"
    thousand = 4 * 1e3 / lora.MIB  # in float32
    for sizes, frozen in ((whole, 0.0), (adapted, whole["trained parameters, thousands"])):
        # Weights, two moments of AdamW and some counters, and the reference.
        trained = sizes["trained parameters, thousands"]
        assert sizes[arrays] == pytest.approx((4 * trained + frozen) * thousand, rel=1e-3)
        assert sizes["RL update, with the optimizer's state, MiB"] > sizes[arrays] / 2
    assert adapted["trained parameters, thousands"] < whole["trained parameters, thousands"] / 2
