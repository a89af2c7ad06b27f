"""Saves the steps of one phase of training: metrics and checkpoints. Stops the run when asked to.

The order in which a step is written matters:

    metrics.jsonl (fsync)  ->  checkpoint, if one is due  ->  stop, if requested

A kill between the first two leaves metrics without a checkpoint; the resumed phase removes them and
repeats the step. The reverse order could leave a checkpoint without its metrics. As it is,
metrics.jsonl holds each step once, and a clean stop repeats no step. A run in a bucket pushes
metrics.jsonl before each checkpoint (`train.durable.run_folder`).
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import math
import pathlib
import pickle
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from models.compilation import Compilations
from paravt_jax.data.any_path import is_bucket
from paravt_jax.processes import hosts
from paravt_jax.processes.exit_codes import Stopped
from paravt_jax.processes.interrupts import Interrupts
from train.durable.checkpoint import Checkpoints, kept_checkpoints, not_finite, unreadable
from train.durable.metrics import (
    PHASE_TITLES,
    PHASES,
    MetricsWriter,
    StepLines,
    memory,
    read_metrics,
    say,
)
from train.durable.run_folder import RESUMED, RunFolder, RunFolderError, identity
from train.learn.packing import GroupLengths
from train.learn.speed import speeds
from train.result import forget_after

T = TypeVar("T")

# What cursors hold: the modules of records, and what arrays are made of.
_RECORDS = (
    "paravt_jax.method.records",
    "rollout.engine.pacing",
    "rollout.engine.requests",
    "train.learn.in_flight",
)
_ARRAYS = (
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"),
)
WARM_UP = 3
"""Steps of a process in which programs of a phase may still compile."""


@dataclasses.dataclass(frozen=True)
class Home:
    """A run that this process has locked, and what all of its phases use."""

    run_folder: RunFolder
    config: dict[str, Any]
    """The run's settings as JSON."""
    metrics: MetricsWriter
    compilations: Compilations = dataclasses.field(default_factory=Compilations)
    interrupts: Interrupts = dataclasses.field(default_factory=Interrupts)
    profile: int = 0
    """Step of each phase to trace; 0: none."""
    check: Callable[[], None] = lambda: None
    """Called before each save, in every process; an exception from it prevents the save."""

    @property
    def folder(self) -> pathlib.Path:
        """The folder of the run's files, without checkpoints."""
        return self.run_folder.folder


class Saver:
    """Saves one phase; a context manager that waits on exit until the last save is complete.

    Args:
        name: `align`, `sft` or `rl`.
        steps: Number of its steps.
        save_every: Steps between regular checkpoints. The last step always has one.
        home: The run.
        origin: What the run starts from, as JSON (`train.model.first_model`). Checkpoints from
            another origin, or of other settings, are refused.
        parts: The model (`train.model.Parts`), which turns a state into what is stored; None: it is
            stored as it is.

    Attributes:
        finished_steps: Steps in the newest checkpoint; 0 if there is none.
    """

    def __init__(
        self,
        name: str,
        steps: int,
        save_every: int,
        home: Home,
        origin: dict[str, Any],
        parts: Any = None,
    ):
        self.name = name
        self._steps = steps
        self._save_every = save_every
        self._home = home
        self._parts = parts
        self._checkpoints = Checkpoints(
            home.run_folder.checkpoints / name,
            identity={"settings": identity(home.config), **origin},
        )
        self._compiled = 0
        # The first process decides for all: on a shared disk the others may see a new checkpoint
        # later than it does.
        self.finished_steps: int = hosts.gather(self._checkpoints.latest())[0] or 0
        self._lines = StepLines(steps)
        self._again = False

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None and issubclass(kind, Exception)
        if failed and hosts.process_count() > 1:
            # Other processes may have no part in a save any more, which would then never complete.
            return
        self._checkpoints.close()

    @property
    def left(self) -> range:
        """The steps still to do, counted from 1."""
        return range(self.finished_steps + 1, self._steps + 1)

    def steps(self) -> Iterator[int]:
        """Yield the steps of `left`, of which one is traced (`Run.profile`). Each ends with `done`.

        Every process writes its trace into RUN/profile/PHASE/process-N.
        """
        options = jax.profiler.ProfileOptions()
        # Calls of Python functions would be most of the events, and slow the step down.
        options.python_tracer_level = 0
        folder = self._home.folder / "profile" / self.name / f"process-{hosts.process_index()}"
        for step in self.left:
            self._compiled = self._home.compilations.count
            trace = contextlib.nullcontext()
            if step == self._home.profile:
                trace = jax.profiler.trace(folder, profiler_options=options)
            with trace, jax.profiler.StepTraceAnnotation(self.name, step_num=step):
                yield step

    def restore(self, initial: T) -> tuple[T, Any]:
        """Restore the newest checkpoint. Call it once, before the first step.

        Args:
            initial: The state before the first step. Its arrays are deleted if another is restored.

        Returns:
            The saved state and data cursor, or `initial` and None if nothing was saved.

        Raises:
            CheckpointError: The checkpoint is damaged, or belongs to another run, model or
                vocabulary.
            RunFolderError: metrics.jsonl lacks lines, or the checkpoint is lost with which the run
                began.
            Stopped: The run was asked to stop and has steps left.
        """
        state = initial
        cursor = None
        if self.finished_steps:
            template = initial if self._parts is None else self._parts.as_saved(initial)
            template = jax.tree.map(_shape, template)
            # Both states together might not fit into the memory of the devices.
            for leaf in jax.tree.leaves(initial):
                leaf.delete()
            saved, packed = self._checkpoints.restore(template, self.finished_steps)
            state = saved if self._parts is None else self._parts.as_trained(saved)
            try:
                cursor = unpack(packed)
            except Exception as error:  # a damaged one finds errors of every kind
                what = f"its position in the data: {error}"
                folder = self._checkpoints.folder / str(self.finished_steps)
                raise unreadable(folder, what) from error
        for start in self._home.config.get(RESUMED, []):
            if start["phase"] == self.name and start["step"] > self.finished_steps:
                # Its steps had other settings, so they cannot be computed again.
                lost = self._checkpoints.folder / str(start["step"])
                raise RunFolderError(
                    f"{lost}, with which the run began, is lost: give another "
                    f"--run-dir, with --resume-from {shlex.quote(start['from'])}"
                )
        self._again = hosts.from_first(self._is_made_again)
        if self.left:
            self._go_on()
        return state, cursor

    def is_regular(self, step: int) -> bool:
        """Return whether `step` has a regular checkpoint."""
        return step % self._save_every == 0 or step == self._steps

    def done(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, float],
        cursor: Any,
        lengths: Sequence[GroupLengths] = (),
        updates: int = 1,
    ) -> None:
        """Record a finished step, and save the state if a checkpoint is due.

        Args:
            step: Number of the step, from 1.
            state: Weights and optimizer state after the step.
            metrics: Those of the step, with "loss".
            cursor: Position in the data after the step: records of episodes, arrays, and what
                JSON can hold.
            lengths: Lengths of its sequences, which tell its speed.
            updates: Number of its updates.

        Raises:
            ValueError: The loss, the gradient norm or a number of a state to save is not finite.
            CheckpointError: The checkpoint could not be written.
            Stopped: The run was asked to stop; the message says what is saved.
        """
        # A sum is finite only if both terms are.
        if not math.isfinite(metrics["loss"] + metrics.get("grad_norm", 0.0)):
            raise self._diverged(f"the loss of {self._step(step)}")
        measured = self._measured(step)
        if lengths and self._parts is not None:
            devices = jax.tree.leaves(state)[0].sharding.num_devices
            measured |= speeds(lengths, self._parts.model.config, metrics, devices, updates)
        values = {**metrics, **measured}
        line = self._home.metrics.write(self.name, step, values, self._again)
        if hosts.is_first():
            self._lines.add(line)
        asked = self._home.interrupts.agree()
        if asked is not None or self.is_regular(step):
            self._save(step, state, cursor)
            if asked is not None:
                # The save may still be running in the background, but the message says it is done.
                self._checkpoints.wait()
        if asked is not None:
            raise Stopped(asked, f"stopped after {self._step(step)}, which is saved")

    def _measured(self, step: int) -> dict[str, float]:
        """Return the metrics that every phase has: compilations, and memory."""
        compiled = self._home.compilations.count - self._compiled
        is_warm = step - self.finished_steps > WARM_UP
        return {"recompilations": float(compiled if is_warm else 0)} | memory()

    def _is_made_again(self) -> bool:
        """Return whether the last checkpoint is lost, although something was made from it.

        Its steps are then computed again. What was made from it stays.

        Raises:
            RunFolderError: Metrics are lost.
        """
        lines = read_metrics(self._home.metrics.path)
        later = PHASES[PHASES.index(self.name) + 1 :]
        exported = any((self._home.folder / name).exists() for name in ("model", "adapter"))
        made = exported or any(line["phase"] in later for line in lines)
        recorded = self._steps if made else self.finished_steps
        own = [line for line in lines if line["phase"] == self.name]
        if sum(line["step"] <= recorded for line in own) < recorded:
            raise RunFolderError(
                f"{self._home.metrics.path}: lines up to {self._step(recorded)} are lost: restore "
                "it from a backup, or start anew with another --run-dir."
            )
        return made and bool(self.left)

    def _go_on(self) -> None:
        """Forget what earlier processes did after the newest checkpoint, and announce the steps."""
        home = self._home
        if not self._again:
            home.metrics.truncate(self.name, self.finished_steps)
        if hosts.is_first():
            if self._again:
                lost = self._checkpoints.folder / str(self._steps)
                say(f"{lost}: lost; its steps are computed again, with the same result")
            else:
                forget_after(home.folder, self.name, self.finished_steps)
        following = self._step(self.finished_steps + 1)
        home.interrupts.check(f"stopped before {following}; all before it is saved")
        if hosts.is_first():
            say(f"{following} is next; the first step after a start compiles")

    def _save(self, step: int, state: Any, cursor: Any) -> None:
        if self._parts is not None:
            state = self._parts.as_saved(state)
        destroyed = not_finite(state)
        if destroyed:
            # An update with a finite loss has destroyed it.
            raise self._diverged(f"after {self._step(step)}, {destroyed}")
        with jax.profiler.TraceAnnotation("save"):
            self._home.check()
            self._home.run_folder.push()
            score = hosts.from_first(lambda: self._score(step))
            self._checkpoints.save(step, state, pack(cursor), score)

    def _diverged(self, what: str) -> ValueError:
        """Return the error of a number that is not finite, with a command that goes on."""
        settings = self._home.config[self.name]
        rate = settings.get("optimizer", settings)["learning_rate"] / 10
        section = "optimizer." if "optimizer" in settings else ""
        self._checkpoints.wait()
        shown = self._home.run_folder.shown
        kept = [] if is_bucket(shown) else kept_checkpoints(self._home.run_folder.checkpoints)
        start = f"--resume-from {shlex.quote(str(kept[-1]))} " if kept else ""
        return ValueError(
            f"{what} is not finite. All that is saved is finite, but the same command computes the "
            f"same again: add {start}--run-dir {shlex.quote(f'{shown}-2')} "
            f"--{self.name}.{section}learning-rate {rate:g} at its end; if that ends so, too, take "
            "an older checkpoint, whose weights are not spoilt"
        )

    def _step(self, step: int) -> str:
        """Return a step as the progress lines name it."""
        return f"{PHASE_TITLES[self.name]} {step}/{self._steps}"

    def _score(self, step: int) -> float | None:
        """Return the mean accuracy since the last regular checkpoint, which picks the best."""
        # A run that is stopped saves between regular checkpoints. If such a checkpoint had a score,
        # the best one would depend on when the run was stopped.
        if self.name != "rl" or not self.is_regular(step):
            return None
        first = (step - 1) // self._save_every * self._save_every + 1
        # Read from disk: the steps may have run in an earlier process.
        values = [
            line["accuracy"]
            for line in read_metrics(self._home.metrics.path)
            if line["phase"] == self.name and first <= line["step"] <= step
        ]
        return sum(values) / len(values)


def _shape(leaf: Any) -> Any:
    """Return the shape, type and sharding of an array on devices; others stay as they are."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def pack(cursor: Any) -> str:
    """Encode records of episodes, arrays, and what JSON can hold, as text for JSON.

    Raises:
        UnpicklingError: `unpack` would refuse it.
    """
    text = base64.b64encode(pickle.dumps(cursor)).decode()
    unpack(text)
    return text


def unpack(text: str) -> Any:
    """Decode what `pack` returned."""
    return _Records(io.BytesIO(base64.b64decode(text))).load()


class _Records(pickle.Unpickler):
    """Reads records of episodes and arrays only, so that a checkpoint cannot run other code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ARRAYS:
            return super().find_class(module, name)
        # A name with a dot could lead to what a module has imported.
        if module in _RECORDS and "." not in name:
            kind = super().find_class(module, name)
            if isinstance(kind, type) and kind.__module__ == module:
                return kind
        raise pickle.UnpicklingError(f"{module}.{name} is no record")
