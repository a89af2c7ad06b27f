"""The comparison of LoRA with full training: its runs, its restart, its arithmetic."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from benchmarks import lora
from benchmarks.lora import FULL, LORA, MEASURED, START, plan
from configs.paravt_tiny import paravt_tiny
from models.lora import LoRASettings
from tests.train.small import small
from train.durable.run_directory import RunDirectory
from train.prepare import prepare
from train.run import resolved


def test_both_arms_begin_with_the_same_weights_and_differ_in_what_is_trained_and_how_fast():
    start, full, adapted = plan("out", 5).values()
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


def test_finished_runs_are_only_read_and_an_interrupted_one_starts_over(tmp_path, monkeypatch):
    done: list[str] = []
    fails = [LORA]

    def fake(out: str, seed: int, name: str) -> None:
        run = plan(out, seed)[name]
        folder = pathlib.Path(run.run_dir)
        assert not folder.exists()
        RunDirectory(folder, resolved(run)).close()
        done.append(name)
        if name in fails:
            raise RuntimeError(f"{name} failed")
        groups = {"hidden": {"calls": 2.0, "n": 8}}
        row = {"k": 4, "dispatch": "parallel", "temperature": 0.0, "groups": groups}
        row |= {"accuracy": 0.5, "compliance": 1.0}
        sides = {"before": [row], "after": [row], "seconds": 90.0}
        (folder / "result.json").write_text(json.dumps(sides))
        (folder / MEASURED).write_text(json.dumps({"checkpoint on disk, MiB": 3.0}))

    monkeypatch.setattr(lora, "start_process", fake)
    command = ["--run-dir", str(tmp_path), "--seeds", "4"]
    with pytest.raises(RuntimeError, match="lora failed"):
        lora.main(command)
    fails.clear()
    assert lora.main(command) == 0
    assert done == [START, FULL, LORA, LORA]
    table = (tmp_path / "table.md").read_text()
    assert table.splitlines()[0].split(" | ")[1:] == ["before RL", "all weights", "LoRA |"]
    assert lora.main(command) == 0
    assert len(done) == 4
    assert (tmp_path / "table.md").read_text() == table


@pytest.mark.slow
def test_memory_counts_the_arrays_with_which_rl_starts(tmp_path):
    data = prepare(small(), tmp_path)
    whole = lora.memory(small(), data)
    adapted = lora.memory(dataclasses.replace(small(), lora=LoRASettings(rank=4)), data)
    arrays = "decoder, optimizer and reference, MiB"
    thousand = 4 * 1e3 / lora.MIB  # in float32
    for found, frozen in ((whole, 0.0), (adapted, whole["trained parameters, thousands"])):
        # Weights, two moments of AdamW and some counters, and the reference.
        trained = found["trained parameters, thousands"]
        assert found[arrays] == pytest.approx((4 * trained + frozen) * thousand, rel=1e-3)
        assert found["RL update, with the optimizer's state, MiB"] > found[arrays] / 2
    assert adapted["trained parameters, thousands"] < whole["trained parameters, thousands"] / 2
