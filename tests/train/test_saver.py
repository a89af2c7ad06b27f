"""The saver of a phase: what a step records, when it is saved, where it stops, how it resumes."""

from __future__ import annotations

import base64
import math
import pathlib
import pickle
import signal

import jax.numpy as jnp
import pytest

from paravt_jax.processes.exit_codes import Stopped
from paravt_jax.processes.interrupts import Interrupts
from tests.train.homes import open_home, open_phase
from train.durable.checkpoint import Checkpoints
from train.durable.metrics import read_metrics
from train.durable.run_folder import RunFolderError
from train.durable.saver import pack, unpack


def checkpoints(folder: pathlib.Path) -> Checkpoints:
    return Checkpoints(folder / "checkpoints" / "rl", read_only=True)


class Run:
    """A phase of 7 steps that adds one to a number; a new object stands for a new process."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.interrupts = Interrupts()
        self.refuse = False
        self.home = open_home(
            folder,
            interrupts=self.interrupts,
            check=self.check,
        )
        self.saver = open_phase("rl", self.home, steps=7, save_every=3)

    def check(self) -> None:
        if self.refuse:
            raise OSError("too many videos cannot be read")

    def steps(
        self,
        accuracy=lambda step: 0.5,
        loss=lambda step: 1.0,
        stop: int = 0,
        number=signal.SIGTERM,
        destroyed: int = 0,
    ) -> list[int]:
        done = []
        with self.saver as saver, self.interrupts:
            state, cursor = saver.restore({"n": jnp.zeros(())})
            assert cursor == ({"at": saver.finished_steps} if saver.finished_steps else None)
            assert state["n"] == saver.finished_steps
            for step in saver.steps():
                if step == stop:
                    signal.raise_signal(number)
                state = {"n": state["n"] + 1}
                done.append(step)
                figures = {"loss": loss(step), "accuracy": accuracy(step)}
                after = {"n": state["n"] * math.nan} if step == destroyed else state
                saver.done(step, after, figures, {"at": step})
        return done

    def latest(self) -> int | None:
        return checkpoints(self.folder).latest()

    def written(self) -> list[int]:
        return [line["step"] for line in read_metrics(self.folder / "metrics.jsonl")]


def test_it_is_saved_regularly_and_at_its_end(tmp_path):
    run = Run(tmp_path)
    assert [step for step in range(1, 8) if run.saver.is_regular(step)] == [3, 6, 7]
    assert run.steps() == [1, 2, 3, 4, 5, 6, 7] == run.written()
    kept = checkpoints(tmp_path)
    assert kept.steps() == [6, 7]
    _, packed = kept.restore({"n": jnp.zeros(())}, 7, part=True)
    assert unpack(packed) == {"at": 7}
    assert Run(tmp_path).steps() == [], "nothing is left to do"
    assert run.written() == [1, 2, 3, 4, 5, 6, 7]


def test_a_stop_saves_the_current_step_and_no_step_is_repeated(tmp_path):
    with pytest.raises(Stopped, match="after PARA-GRPO 4/7, "):
        Run(tmp_path).steps(stop=4)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = Run(tmp_path)
    assert again.latest() == 4
    assert again.written() == [1, 2, 3, 4]
    assert again.steps() == [5, 6, 7]
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(before)


def test_steps_of_other_settings_are_not_computed_again(tmp_path):
    resumed = {"from": "old/checkpoints/rl/3", "phase": "rl", "step": 3}
    home = open_home(tmp_path, config={"resumed": [resumed]})
    message = r"rl/3, with which .* lost: .* old/checkpoints/rl/3$"
    with open_phase("rl", home, 7, 3) as saver, pytest.raises(RunFolderError, match=message):
        saver.restore({"n": jnp.zeros(())})


def test_a_stop_before_the_first_step_does_nothing(tmp_path):
    run = Run(tmp_path)
    with run.interrupts, pytest.raises(Stopped, match="before PARA-GRPO 1/7; "):
        signal.raise_signal(signal.SIGINT)
        run.saver.restore({"n": jnp.zeros(())})
    assert run.written() == []
    assert run.latest() is None


def test_an_infinite_loss_ends_it_and_steps_after_the_last_save_are_repeated(tmp_path):
    message = "^the loss of PARA-GRPO 5/7 is not finite. .*: add --resume-from .*/rl/3 --run-dir "
    with pytest.raises(ValueError, match=message):
        Run(tmp_path).steps(loss=lambda step: float("nan") if step == 5 else 1.0)
    run = Run(tmp_path)
    assert (run.latest(), run.written()) == (3, [1, 2, 3, 4])
    assert run.steps() == [4, 5, 6, 7]
    assert run.written() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("step", "good"), [(3, None), (6, 3), (7, 6)])
def test_what_an_update_has_destroyed_is_not_saved(tmp_path, step, good):
    """The loss of a step is that of the weights before its update."""
    message = f"^after PARA-GRPO {step}/7, n is not finite. .* --rl.optimizer.learning-rate 0.1 "
    with pytest.raises(ValueError, match=message):
        Run(tmp_path).steps(destroyed=step)
    run = Run(tmp_path)
    assert run.latest() == good
    assert run.steps() == [*range((good or 0) + 1, 8)]


def test_the_best_of_the_regular_checkpoints_is_kept(tmp_path):
    # Means since the last regular checkpoint: 0.57, 0.5, 0.5.
    accuracy = {1: 0.2, 2: 0.9, 3: 0.6, 4: 1.0, 5: 0.2, 6: 0.3, 7: 0.5}
    with pytest.raises(Stopped):
        # The stop saves step 4, but its 1.0 is no score of its own.
        Run(tmp_path).steps(accuracy.__getitem__, stop=4)
    Run(tmp_path).steps(accuracy.__getitem__)
    kept = checkpoints(tmp_path)
    assert kept.steps() == [3, 6, 7]
    assert kept.best() == 3


def test_an_error_before_a_save_prevents_it(tmp_path):
    run = Run(tmp_path)
    run.refuse = True
    with pytest.raises(OSError, match="too many videos"):
        run.steps()
    assert run.written() == [1, 2, 3]
    assert checkpoints(tmp_path).latest() is None


def test_a_resumed_phase_says_where_it_goes_on(tmp_path, capsys):
    with pytest.raises(Stopped):
        Run(tmp_path).steps(stop=3)
    capsys.readouterr()
    Run(tmp_path).steps()
    begin, *lines = capsys.readouterr().err.splitlines()
    assert begin.startswith("PARA-GRPO 4/7 is next")
    # Steps of milliseconds have two lines: the first and the last.
    assert lines[0] == "PARA-GRPO 4/7 · loss 1.00 · accuracy 0.50 · 0.000 s"
    assert lines[-1].startswith("PARA-GRPO 7/7")


def test_what_compiles_after_the_first_steps_is_counted(tmp_path):
    run = Run(tmp_path)

    def loss(step: int) -> float:
        run.home.compilations.count += step
        return 1.0

    run.steps(loss=loss)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["recompilations"] for line in lines[:3]] == [0, 0, 0]
    assert [line["recompilations"] >= line["step"] for line in lines[3:]] == [True] * 4


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("numpy", "memmap"),
        ("paravt_jax.data.workers", "subprocess.Popen"),
        ("paravt_jax.method.records", "hashlib.new"),
        ("paravt_jax.method.records", "Any"),
        ("builtins", "eval"),
    ],
)
def test_a_cursor_cannot_name_other_code(module, name):
    call = b"\x80\x04" + b"".join(b"\x8c%c%s" % (len(x), x.encode()) for x in (module, name))
    with pytest.raises(pickle.UnpicklingError, match=f"{module}.{name} is no record"):
        unpack(base64.b64encode(call + b"\x93.").decode())


def test_what_could_not_be_read_again_is_not_saved():
    with pytest.raises(pickle.UnpicklingError, match="is no record"):
        pack({"at": pathlib.Path("x")})
