"""Going back to an older checkpoint leaves nothing of later steps, and what is lost is named."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax.numpy as jnp
import pytest

from paravt_jax.data.stored import write_checked_json
from tests.train.homes import open_home, open_phase
from train.durable.checkpoint import CheckpointError
from train.durable.metrics import read_metrics
from train.durable.run_folder import RunFolderError
from train.result import set_damaged_aside


def train(folder: pathlib.Path, name: str, steps: int) -> int:
    """Train a phase, as a new process, to its last step; return the step it went on from.

    A file is made from the weights of each step, and a result at the end.
    """
    home = open_home(folder)
    (folder / "evaluation").mkdir(exist_ok=True)
    with open_phase(name, home, steps, save_every=2) as saver:
        saver.restore({"n": jnp.zeros(())})
        for step in saver.steps():
            made = {"phase": name, "step": step, "rows": [], "episodes": []}
            write_checked_json(folder / "evaluation" / f"{name}-{step}.json", made)
            saver.done(step, {"n": jnp.full((), step, float)}, {"loss": 1.0, "accuracy": 0.5}, {})
    (folder / "result.json").write_text("{}")
    return saver.finished_steps


def made(folder: pathlib.Path) -> dict[str, int]:
    """The files of evaluations, each with its time."""
    return {file.stem: file.stat().st_mtime_ns for file in (folder / "evaluation").iterdir()}


@pytest.fixture
def run(tmp_path) -> pathlib.Path:
    """A run with four steps of SFT and four of RL; each phase keeps checkpoints 2 and 4."""
    train(tmp_path, "sft", 4)
    train(tmp_path, "rl", 4)
    return tmp_path


def test_a_finished_run_loses_nothing_by_the_same_command(run):
    before = made(run)
    assert (train(run, "sft", 4), train(run, "rl", 4)) == (4, 4)
    assert made(run) == before and len(before) == 8


def test_lost_lines_of_the_metrics_are_an_error(run):
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    for left in (lines[:5] + lines[6:], []):
        metrics.write_text("".join(left))
        with pytest.raises(RunFolderError, match="lines up to PARA-GRPO 4/4 are lost"):
            train(run, "rl", 4)


def test_metrics_after_the_last_checkpoint_are_not_verified(run):
    """They are removed before the run goes on."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"phase": "rl", "step": 5, "wall": 0.0}) + "\n")
    assert train(run, "rl", 6) == 4
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")][-2:] == [5, 6]


@pytest.mark.parametrize(
    ("phase", "lost", "first"), [("sft", "", 0), ("sft", "4", 2), ("rl", "4", 2)]
)
def test_lost_steps_are_computed_again_and_what_was_made_from_them_stays(
    run, capsys, phase, lost, first
):
    shutil.rmtree(run / "checkpoints" / phase / lost)
    (run / "model").mkdir()
    metrics, before = (run / "metrics.jsonl").read_bytes(), made(run)
    assert train(run, phase, 4) == first
    assert f"{phase}/4: lost; its steps are computed again" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == metrics
    after = made(run)
    again = {f"{phase}-{step}" for step in range(first + 1, 5)}
    assert {name for name in before if after[name] != before[name]} == again
    assert train(run, phase, 4) == 4


def test_without_its_newest_checkpoint_a_run_goes_on_from_the_one_before(run):
    shutil.rmtree(run / "checkpoints" / "rl" / "4")
    before = made(run)
    assert train(run, "rl", 4) == 2
    steps = [(line["phase"], line["step"]) for line in read_metrics(run / "metrics.jsonl")]
    assert steps == [(phase, step) for phase in ("sft", "rl") for step in (1, 2, 3, 4)]
    after = made(run)
    assert {name for name in before if after[name] != before[name]} == {"rl-3", "rl-4"}
    assert train(run, "rl", 4) == 4


def test_a_damaged_evaluation_ends_no_run(run, capsys):
    file = run / "evaluation" / "sft-1.json"
    file.write_bytes(file.read_bytes()[:-1])
    set_damaged_aside(run)
    assert f"{file}: damaged: " in capsys.readouterr().err
    assert train(run, "rl", 6) == 4
    assert len(made(run)) == 10 and not file.exists()


def test_a_damaged_checkpoint_is_named_and_stays_where_it_is(run):
    shutil.rmtree(run / "checkpoints" / "rl" / "4" / "state")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="rl/4 cannot be read .* the one before it"):
            train(run, "rl", 4)
    shutil.rmtree(run / "checkpoints" / "rl" / "4")
    assert train(run, "rl", 4) == 2
