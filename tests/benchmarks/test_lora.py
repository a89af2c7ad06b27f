"""The comparison of LoRA with full training: its runs, its restart, its arithmetic."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import lora
from benchmarks.lora import FULL, LORA, MEASURED, MIB, START, Comparison, plan, table
from configs.paravt_tiny import paravt_tiny
from models.lora import LoRASettings
from paravt_jax.data.stored_json import write_checked_json
from tests.train.small import small
from train.durable.run_directory import RunDirectory
from train.prepare import prepare
from train.run import resolved

NAMES = (START, FULL, LORA)


class Fake:
    """Replaces a process: writes figures that depend on the run and the seed."""

    def __init__(self, fails: str = ""):
        self.fails = fails
        self.done: list[tuple[str, int]] = []

    def __call__(self, out: str, seed: int, name: str) -> None:
        run = plan(out, seed)[name]
        folder = pathlib.Path(run.run_dir)
        assert not folder.exists()
        RunDirectory(folder, resolved(run)).close()
        self.done.append((name, seed))
        if name == self.fails:
            raise RuntimeError(f"{name} failed")
        learned = {START: 0.4, FULL: 0.9, LORA: 0.8}[name] + seed / 100
        phase = "before" if name == START else "after"
        rows = [row(4, learned), row(64, 0.5), row(4, 0.1) | {"temperature": 0.7}]
        (folder / "result.json").write_text(json.dumps({phase: rows, "seconds": 90.0}))
        measured = {"process, largest resident size": 1e9}
        if name != START:
            measured |= dict.fromkeys(lora.SIZES, (3 if name == FULL else 1) * MIB)
            measured["trained parameters"] = 2e6
        (folder / MEASURED).write_text(json.dumps(measured))


def row(k: int, score: float) -> dict[str, Any]:
    name = "hidden" if k == 4 else "mcq shown"
    groups = {name: {"calls": 2 * score, "n": 8}}
    setting = {"k": k, "dispatch": "parallel", "temperature": 0.0}
    return setting | {"accuracy": score, "compliance": 1.0, "groups": groups}


def run(out: pathlib.Path, seeds: Sequence[int], monkeypatch, fails: str = "") -> tuple[int, Fake]:
    fake = Fake(fails)
    monkeypatch.setattr(lora, "start_process", fake)
    code = lora.main(["--out", str(out), "--seeds", *map(str, seeds)])
    return code, fake


def test_both_arms_begin_with_the_same_weights_and_differ_in_what_is_trained_and_how_fast():
    for seed in (4, 5):
        start, full, adapted = plan("out", seed).values()
        assert start.rl is None and start.world is not None and start.text is not None
        assert start.seed == start.world.seed == start.text.seed == seed
        assert full.model.path == adapted.model.path == f"{start.run_dir}/model"
        assert full.world == adapted.world == start.world
        assert full.align is full.sft is full.lora is None
        tiny = paravt_tiny().rl
        assert tiny is not None and adapted.rl is not None
        assert full.rl == dataclasses.replace(tiny, control=False)
        rate = dataclasses.replace(tiny.optimizer, learning_rate=5e-4)
        assert adapted.rl.optimizer == rate
        same: dict[str, Any] = {"name": "", "run_dir": "", "lora": None, "rl": full.rl}
        assert dataclasses.replace(adapted, **same) == dataclasses.replace(full, **same)


def test_finished_runs_are_only_read_and_an_interrupted_one_starts_over(
    tmp_path, monkeypatch, capsys
):
    out = tmp_path / "study"
    code, stopped = run(out, (4, 5), monkeypatch, fails=LORA)
    assert (code, stopped.done) == (1, [(START, 4), (FULL, 4), (LORA, 4)])
    assert "error: lora failed" in capsys.readouterr().err
    code, fake = run(out, (4, 5), monkeypatch)
    assert code == 0
    assert fake.done == [(LORA, 4), *((name, 5) for name in NAMES)]
    printed = capsys.readouterr().out
    assert (out / "table.md").read_text() == printed
    code, fake = run(out, (4, 5), monkeypatch)
    assert (code, fake.done) == (0, [])
    assert capsys.readouterr().out == printed


def test_a_run_with_other_settings_is_not_taken_for_one_of_these(tmp_path, monkeypatch, capsys):
    run(tmp_path, (4,), monkeypatch)
    file = tmp_path / "lora-4" / "config.json"
    text = file.read_text()
    changed = json.loads(text.replace('"rank": 16', '"rank": 8'))
    assert changed != json.loads(text)
    del changed["checksum"]
    write_checked_json(file, changed)
    code, fake = run(tmp_path, (4,), monkeypatch)
    assert (code, fake.done) == (1, [])
    assert "rank" in capsys.readouterr().err


def test_a_process_that_fails_is_named_with_its_log(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lora.sys, "executable", "/bin/false")
    assert lora.main(["--out", str(tmp_path), "--seeds", "4"]) == 1
    log = tmp_path / "start-4.log"
    assert f"start, seed 4: ended with exit code 1; see {log}" in capsys.readouterr().err


def test_the_table_has_means_deviations_and_paired_differences(tmp_path, monkeypatch):
    run(tmp_path, (4, 6), monkeypatch)
    found = json.loads((tmp_path / "results.json").read_text())["figures"]
    cells = {
        line[0]: line[1:]
        for line in (
            [cell.strip() for cell in text.strip("| ").split(" | ")]
            for text in table(found).splitlines()
        )
    }
    # Seeds 4 and 6 are 0.02 apart; their deviation is that over the root of 2.
    assert cells["accuracy, K = 4"] == ["0.45 ± 0.01", "0.95 ± 0.01", "0.85 ± 0.01", "-0.10 ± 0.00"]
    assert cells["accuracy, K = 64"][:2] == ["0.50 ± 0.00", "0.50 ± 0.00"]
    crops = cells["crops per question, no frame shows the answer"]
    assert crops == ["0.90 ± 0.03", "1.90 ± 0.03", "1.70 ± 0.03", "-0.20 ± 0.00"]
    assert cells["crops per question, grounding, a frame in the span"] == ["–"] * 4
    assert cells["optimizer, MiB"] == ["–", "3.00 ± 0.00", "1.00 ± 0.00", "-2.00 ± 0.00"]
    assert cells["trained parameters, thousands"][1] == "2,000.00 ± 0.00"
    assert cells["minutes"][0] == "1.5 ± 0.0"


@pytest.mark.slow
def test_memory_counts_the_arrays_with_which_rl_starts(tmp_path):
    data = prepare(small(), tmp_path)
    whole = lora.memory(small(), data)
    rank = 4
    settings = LoRASettings(rank=rank)
    adapted = lora.memory(dataclasses.replace(small(), lora=settings), data)
    # In float32. AdamW has two moments per parameter, and some counters.
    for found in (whole, adapted):
        size = 4 * found["trained parameters"]
        assert found["reference"] == size
        assert 2 * size < found["optimizer"] < 2 * size + 64
        parts = ("decoder", "optimizer", "reference")
        assert found["decoder, optimizer and reference"] == sum(found[name] for name in parts)
        # Arguments include the decoder and the gradients.
        beside = found["RL update, arguments and temporaries"] - found["RL update, temporaries"]
        assert beside > found["decoder"] + size
    assert whole["decoder"] == 4 * whole["trained parameters"]
    assert adapted["decoder"] == whole["decoder"] + 4 * adapted["trained parameters"]
    assert adapted["trained parameters"] < whole["trained parameters"] / 2


def test_the_size_of_a_checkpoint_is_that_of_its_files(tmp_path):
    for step, size in (("14", 10), ("28", 500)):
        (tmp_path / step / "state" / "d").mkdir(parents=True)
        (tmp_path / step / "state" / "d" / "0").write_bytes(bytes(size))
        (tmp_path / step / "state" / "1").write_bytes(bytes(size))
    assert lora.checkpoint_bytes(tmp_path) == 1000.0


@pytest.mark.parametrize("seeds", [(), (4, 4), (-1,)])
def test_seeds_are_different_numbers(seeds):
    with pytest.raises(ValueError, match="seeds: "):
        Comparison(seeds=seeds)
