"""A phase of training: metrics and checkpoints of its steps, interruption and resumption."""

from __future__ import annotations

import pathlib
import signal
from typing import Any

import jax.numpy as jnp
import pytest

from train.durable.checkpoint import CheckpointError, Checkpoints
from train.durable.interrupts import Interrupts, Stopped
from train.durable.metrics import MetricsWriter, read_metrics
from train.durable.phase import Phase


class Run:
    """A phase that adds one to a number in each step. A new Run stands for a new process."""

    def __init__(self, folder: pathlib.Path, identity: dict[str, Any] | None = None):
        self.folder, self.interrupts, self.refuse = folder, Interrupts(), False
        self.kept = Checkpoints(folder / "rl", asynchronous=True, identity=identity)
        self.metrics = MetricsWriter(folder, tensorboard=False)
        self.phase = Phase(
            "rl",
            7,
            3,
            self.kept,
            self.metrics,
            self.interrupts,
            {"config": 1},
            before_save=self.check,
            best="accuracy",
        )

    def check(self) -> None:
        if self.refuse:
            raise OSError("too many videos cannot be read")

    def steps(self, accuracy=lambda step: 0.5, loss=lambda step: 1.0, stop: int = 0) -> list[int]:
        done = []
        with self.phase as phase, self.interrupts:
            state, cursor = phase.resume({"n": jnp.zeros(())})
            assert (
                cursor == ({"at": phase.first} if phase.first else None)
                and state["n"] == phase.first
            )
            for step in phase.left:
                if step == stop:
                    signal.raise_signal(signal.SIGTERM)
                state = {"n": state["n"] + 1}
                done.append(step)
                phase.done(
                    step,
                    {"loss": loss(step), "accuracy": accuracy(step)},
                    state,
                    {"at": step},
                    ("loss",),
                )
        return done

    def written(self) -> list[int]:
        return [row["step"] for row in read_metrics(self.folder / "metrics.jsonl")]


def test_it_is_saved_regularly_and_at_its_end(tmp_path):
    run = Run(tmp_path)
    assert [step for step in range(1, 8) if run.phase.saves(step)] == [3, 6, 7]
    assert run.steps() == [1, 2, 3, 4, 5, 6, 7] == run.written()
    kept = Checkpoints(tmp_path / "rl")
    assert kept.steps() == [6, 7] and kept.meta() == {"config": 1, "cursor": {"at": 7}}
    assert Run(tmp_path).steps() == [], "finished steps are not repeated"
    assert run.written() == [1, 2, 3, 4, 5, 6, 7]


def test_a_signal_saves_the_current_step_and_no_step_is_repeated(tmp_path):
    with pytest.raises(Stopped, match="step 4 of 7"):
        Run(tmp_path).steps(stop=4)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = Run(tmp_path)
    assert again.kept.latest() == 4 and again.written() == [1, 2, 3, 4]
    assert again.steps() == [5, 6, 7]
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(before)


def test_a_signal_before_the_first_step_stops_it_there(tmp_path):
    run = Run(tmp_path)
    with (
        run.interrupts,
        pytest.raises(Stopped, match="before step 1 of 7"),
    ):
        signal.raise_signal(signal.SIGINT)
        run.phase.resume({"n": jnp.zeros(())})
    assert run.written() == [] and run.kept.latest() is None


def test_steps_after_the_last_save_are_repeated(tmp_path):
    with pytest.raises(ValueError, match="loss of step 5 .*finite"):
        Run(tmp_path).steps(loss=lambda step: float("nan") if step == 5 else 1.0)
    run = Run(tmp_path)
    assert (run.kept.latest(), run.written()) == (3, [1, 2, 3, 4])
    assert run.steps() == [4, 5, 6, 7] and run.written() == [1, 2, 3, 4, 5, 6, 7]


def test_the_best_of_the_regular_checkpoints_stays(tmp_path):
    accuracy = {1: 0.2, 2: 0.9, 3: 0.6, 4: 1.0, 5: 0.2, 6: 0.3, 7: 0.5}  # means 0.57, 0.5, 0.5
    with pytest.raises(Stopped):
        Run(tmp_path).steps(accuracy.__getitem__, stop=4)  # whose 1.0 does not count
    Run(tmp_path).steps(accuracy.__getitem__)
    kept = Checkpoints(tmp_path / "rl")
    assert kept.steps() == [3, 6, 7] and kept.best() == 3


def test_an_error_before_a_save_prevents_it(tmp_path):
    run = Run(tmp_path)
    run.refuse = True
    with pytest.raises(OSError, match="too many videos"):
        run.steps()
    assert run.written() == [1, 2, 3] and Checkpoints(tmp_path / "rl").latest() is None


def test_another_runs_checkpoint_is_refused_with_the_difference(tmp_path):
    Run(
        tmp_path, {"settings": {"seed": 0}, "model": {"hidden": 8}, "vocabulary": {"size": 5}}
    ).steps()
    others = {"settings": {"seed": 1}, "model": {"hidden": 16}, "vocabulary": {"size": 6}}
    with pytest.raises(CheckpointError) as refusal:
        Run(tmp_path, others).steps()
    assert "\n  settings.seed: 0 -> 1\n  model.hidden: 8 -> 16\n  vocabulary.size: 5 -> 6\n" in str(
        refusal.value
    )
