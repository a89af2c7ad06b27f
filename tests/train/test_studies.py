"""The studies without training: their runs, what stops them, their tables and figures."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import pytest

from paravt_extras.studies import paradox
from paravt_extras.studies.paradox import ARMS, COLD_START, Paradox
from paravt_jax.processes.interrupts import Interrupts
from train.durable.run_folder import claim_folder
from train.run import resolved
from train.settings import Run

GRPO, ANCHORED, GATED, FULL = ARMS
KS = (4, 64)


class FakeRuns:
    """Replaces `execute`: writes the files of a run, with figures that depend on its seed."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []

    def __call__(self, run: Run, interrupts: Interrupts) -> None:
        interrupts.check("stopped")
        folder = pathlib.Path(run.run_dir)
        with claim_folder(folder, resolved(run)):
            pass
        self.done.append((run.name, run.seed))
        value = run.seed / 100
        result = {
            "before": [entry(k, 0.1, 0.0) for k in KS],
            "curve": [entry(k, 0.2, 1.0) | {"step": 14} for k in KS],
            "after": [entry(k, 0.5 + value, 2.0) for k in KS],
        }
        (folder / "result.json").write_text(json.dumps(result))
        lines = [{"phase": "sft", "step": 1, "wall": 0.0}]
        if run.rl is not None:
            lines += [rl_line(step, value) for step in range(1, 21)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def entry(k: int, accuracy: float, calls: float) -> dict[str, Any]:
    groups = {
        name: {"score": accuracy, "calls": calls, "n": 4}
        for name in ("mcq", "tvg", "mcq hidden" if k == 4 else "mcq shown")
    }
    measured = {"accuracy": accuracy, "calls": calls, "compliance": 0.5, "tool_gap": None, "n": 8}
    measured["format_reward"] = 0.5
    return {"k": k, "dispatch": "parallel", "temperature": 0.0, "groups": groups} | measured


def rl_line(step: int, value: float) -> dict[str, Any]:
    return {
        "phase": "rl",
        "step": step,
        "wall": 60.0 * step,
        "accuracy": step / 20 + value,
        "compliance": 0.5,
        "calls": 1.0,
        # One step in two has rollouts with calls and without: the gap is the weighted mean.
        "k4/tool_gap": 1.0 if step % 2 else None,
        "k4/rollouts": 8,
        "k4/rollouts_with_calls": 4,
        "tags/think_close/probability": step / 20,
        "tags/think_close/count": 5.0,
    }


@pytest.fixture
def fake(monkeypatch):
    """Replaces training; settings of the process are restored."""
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    fake = FakeRuns()
    monkeypatch.setattr("train.run.execute", fake)
    yield fake
    jax.config.update("jax_compilation_cache_dir", before)


def cells(folder: pathlib.Path) -> dict[str, list[str]]:
    """The lines of table.md by their first cell."""
    lines = (folder / "table.md").read_text().splitlines()
    entries = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {entry[0]: entry[1:] for entry in entries}


# --- the runs ---


def test_the_settings_of_the_paradox_share_one_cold_start():
    runs = paradox.runs_of(Paradox(run_dir="here", seeds=(0, 5)))
    assert list(runs) == [COLD_START, *ARMS]
    (start,) = runs[COLD_START]
    assert start.rl is None
    for arm in ARMS:
        assert [run.seed for run in runs[arm]] == [0, 5]
        for run in runs[arm]:
            assert run.model.path == f"{start.run_dir}/model"
            assert (run.sft, run.align) == (None, None)
            assert (run.world, run.text) == (start.world, start.text)
            assert run.evaluation == start.evaluation
    assert len({run.run_dir for of_arm in runs.values() for run in of_arm}) == 9


# --- the commands ---


def test_the_paradox_writes_its_table_and_its_figure_and_finished_runs_are_only_read(
    fake, tmp_path, capsys
):
    command = ["--run-dir", str(tmp_path), "--seeds", "0", "2"]
    assert paradox.main(command) == 0
    names = ["grpo", "exploration-anchoring", "nframes-gating", "para-grpo"]
    start = ("cold_start", fake.done[0][1])
    assert fake.done == [start, *((name, seed) for seed in (0, 2) for name in names)]
    folder = tmp_path
    table = cells(folder)
    assert table["accuracy, K = 4"][1:] == ["0.51 [0.5, 0.52]"] * 4
    # Steps 16 to 20.
    assert table["accuracy, training"] == ["–", *["0.91 [0.9, 0.92]"] * 4]
    assert table["probability of `</think>`, training"][1] == "0.9 [0.9, 0.9]"
    assert table["tool gap of the reward, training, K = 4"][1] == "1 [1, 1]"
    assert table["compliance, temperature 0"] == ["0.5", *["0.5 [0.5, 0.5]"] * 4]
    figure = (folder / "figure.svg").read_text()
    assert all(name in figure for name in (*ARMS, COLD_START))
    assert (folder / "table.md").read_text() in capsys.readouterr().out
    fake.done.clear()
    assert paradox.main(command) == 0
    assert not fake.done
    assert (folder / "figure.svg").read_text() == figure
