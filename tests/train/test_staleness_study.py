"""The command on rollouts that outlive an update, without training: its runs and its table."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import jax
import pytest

from paravt_extras.studies import staleness, study
from paravt_extras.studies.staleness import MAX_STALENESS, Staleness, plan
from train.durable.interrupts import Interrupts
from train.durable.run_directory import RunDirectory, cold_start_identity
from train.run import resolved
from train.settings import Run, change


class FakeRuns:
    """Replaces `execute`: writes figures that depend on the bound and the seed."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []

    def __call__(self, run: Run, interrupts: Interrupts) -> None:
        folder = pathlib.Path(run.run_dir)
        RunDirectory(folder, resolved(run)).close()
        self.done.append((run.name, run.seed))
        bound = 0 if run.rl is None else run.rl.max_staleness
        rows = [
            {"k": k, "dispatch": "parallel", "temperature": 0.0, "accuracy": 0.5 + run.seed / 100}
            for k in (4, 64)
        ]
        (folder / "result.json").write_text(json.dumps({"before": rows, "after": rows}))
        with (folder / "metrics.jsonl").open("w") as file:
            for step in range(1, 21):
                line = {
                    "phase": "rl",
                    "step": step,
                    "wall": 60.0 * step,
                    "format_reward": 0.9,
                    "calls": 1.0,
                    "kl_reference": 1.0 if step > 10 else 9.0,
                    "behaviour_weight": 1.0,
                    "behaviour_weight_max": 1.0 + step / 10,
                    "capped_fraction": 0.0,
                    "length/response": 30.0,
                    "time/rollout": 4.0 - bound,
                }
                if bound:
                    line |= {
                        "staleness/mean": 0.5 * bound,
                        "length/sampled": 30.0 if step % 2 else 40.0,
                        "in_flight/ended": 3.0 if step % 2 else 1.0,
                    }
                file.write(json.dumps(line) + "\n")


@pytest.fixture
def folder(tmp_path) -> Iterator[pathlib.Path]:
    """A fresh folder; settings of the process are restored."""
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    yield tmp_path / "study"
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_runs_of_a_seed_differ_in_the_bound_alone_and_share_a_cold_start():
    start, *arms = plan(Staleness("s"), seed=5)
    assert start.world is not None and start.text is not None
    assert start.seed == start.world.seed == start.text.seed == 5
    assert [arm.rl.max_staleness for arm in arms if arm.rl is not None] == list(MAX_STALENESS)
    for arm in arms:
        assert arm.start == start.run_dir
        assert cold_start_identity(resolved(arm)) == cold_start_identity(resolved(start))
        same = {"run_dir": arms[0].run_dir, "rl.max_staleness": 0}
        assert change(arm, arms[0].name, same) == arms[0]


def test_the_table_has_a_column_for_each_bound_and_finished_runs_are_only_read(
    folder, monkeypatch, capsys
):
    fake = FakeRuns()
    monkeypatch.setattr(study, "execute", fake)
    monkeypatch.setattr(study, "reuse_freed_memory", lambda: None)
    command = ["--run-dir", str(folder), "--seeds", "4", "6"]
    assert staleness.main(command) == 0
    names = ["start", *(f"stale{bound}" for bound in MAX_STALENESS)]
    assert fake.done == [(name, seed) for seed in (4, 6) for name in names]
    lines = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in capsys.readouterr().out.splitlines()
    }
    assert lines["max_staleness"] == ["0", "1", "2"]
    assert lines["accuracy after RL, mean over K"] == ["0.55 ± 0.014"] * 3
    assert lines["KL, last 10 steps"] == ["1 ± 0"] * 3
    assert lines["behaviour weight, largest"] == ["3 ± 0"] * 3
    assert lines["age of trained tokens, updates"] == ["–", "0.5 ± 0", "1 ± 0"]
    assert lines["tokens per episode, all that ended"] == ["–", "32.5 ± 0", "32.5 ± 0"]
    assert lines["seconds per step, sampling"] == ["4 ± 0", "3 ± 0", "2 ± 0"]
    assert lines["minutes of RL"] == ["19 ± 0"] * 3
    assert json.loads((folder / "results.json").read_text())["seeds"] == [4, 6]

    fake.done.clear()
    assert staleness.main(command) == 0
    assert not fake.done


@pytest.mark.parametrize("seeds", [(), (-1,), (4, 4)])
def test_seeds_that_are_no_seeds_are_refused(seeds):
    with pytest.raises(ValueError, match="seeds"):
        Staleness("s", seeds)
