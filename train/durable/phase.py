"""One phase of training: records its steps, saves checkpoints, resumes, and stops on request.

The order in which a step is written matters:

    metrics.jsonl (fsync)  ->  checkpoint, if one is due  ->  report  ->  stop, if requested

A kill between the first two leaves metrics without a checkpoint; the resumed phase removes them and
repeats the step. The reverse order could leave a checkpoint without its metrics. As it is,
metrics.jsonl holds each step once, and a clean stop repeats no step, unless there was no time to
save it (`checkpoints.grace`). A run in a bucket pushes metrics.jsonl before each checkpoint
(`train.durable.place`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
from jaxtyping import PyTree

from paravt_jax.processes import hosts
from train.durable.checkpoint import Checkpoints
from train.durable.finite import not_finite
from train.durable.history import History
from train.durable.interrupts import Interrupts, Stopped
from train.durable.metrics import PHASE_TITLES, MetricsWriter, read_metrics
from train.durable.profile import Profiler
from train.durable.step_lines import StepLines
from train.durable.usage import Usage

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Saves:
    """When a phase is saved, where, and with what."""

    checkpoints: Checkpoints
    """Where the phase is saved and resumed from."""
    every: int
    """Steps between regular checkpoints. The last step always has one."""
    meta: Mapping[str, Any]
    """Stored in each checkpoint beside the data cursor."""
    restart_every: int = 0
    """Steps between further checkpoints, which only serve a restart: no report is written with
    them. 0: none."""
    best: str | None = None
    """Metric, higher is better, whose mean since the last regular checkpoint becomes the score of
    the next one."""
    before: Callable[[], None] = lambda: None
    """Called before each save; an exception from it prevents the save."""
    after: Callable[[], None] = lambda: None
    """Called after each regular save, which may still run in the background."""


class Phase:
    """A phase of training; a context manager that waits on exit until the last save is complete.

    Args:
        name: "align", "sft", "control" or "rl".
        steps: number of steps.
        saves: when it is saved, where, and with what.
        metrics: where its metrics are recorded.
        interrupts: asked after every step whether to stop.
        history: the run's manifest, where saved steps are noted.
        tick: called after each step.
        profiler: traces some of the steps; None: none of them.
        usage: adds memory, compiling and goodput to the metrics of each step; None: they have none.

    Attributes:
        finished_steps: steps in the newest checkpoint; 0 if there is none.
    """

    def __init__(
        self,
        name: str,
        steps: int,
        saves: Saves,
        metrics: MetricsWriter,
        interrupts: Interrupts,
        history: History,
        tick: Callable[[], None] = lambda: None,
        profiler: Profiler | None = None,
        usage: Usage | None = None,
    ):
        self.name = name
        self.steps = steps
        self._saves = saves
        self._checkpoints = saves.checkpoints
        self._metrics = metrics
        self._interrupts = interrupts
        self._history = history
        self._tick = tick
        self._profiler = profiler
        self._usage = usage
        # The first process decides for all: on a shared disk the others may see a new checkpoint
        # later than it does.
        self.finished_steps = hosts.gather(self._checkpoints.latest())[0] or 0
        self._first = self.finished_steps + 1
        # The step of the last save, which may still be running in the background.
        self._saved = 0
        # Opened by `resume`, in the first process only.
        self._lines: StepLines | None = None

    def __enter__(self) -> Phase:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None and issubclass(kind, Exception)
        if failed and hosts.process_count() > 1:
            # Other processes may have no part in a save any more, which would then never complete.
            return
        self._checkpoints.close()
        self._note_saved()
        if self._profiler is not None:
            self._profiler.close()

    @property
    def left(self) -> range:
        """The steps still to do, counted from 1."""
        return range(self.finished_steps + 1, self.steps + 1)

    def each(self) -> Iterator[int]:
        """The steps of `left`, of which the profiler traces some. Each ends with `done`."""
        if self._profiler is None:
            return iter(self.left)
        return self._profiler.annotated(self.name, self.left)

    def resume(self, start: T) -> tuple[T, Any]:
        """Restores the newest checkpoint. Call it once, before the first step.

        Returns:
            The saved state and data cursor, or (`start`, None) if nothing was saved.

        Raises:
            CheckpointError: the checkpoint belongs to another run, model or vocabulary.
            ValueError: it holds numbers that are not finite.
            RunDirectoryError: the newest checkpoint is lost, and the run cannot go on from another.
            Stopped: the run was asked to stop and has steps left.
        """
        self._interrupts.kept = self._kept
        state = start
        cursor = None
        if self.finished_steps:
            state, meta, _ = self._checkpoints.restore(start)
            cursor = meta["cursor"]
        destroyed = not_finite(state) if self.finished_steps else ""
        if destroyed:
            raise ValueError(
                f"{self._step(self.finished_steps)} was saved with numbers that are not finite "
                f"({destroyed}), by an earlier version: {self._remedy()}"
            )
        if self.left:
            hosts.from_first(lambda: self._history.go_on(self.name, self.finished_steps))
            self._metrics.truncate(self.name, self.finished_steps)
            if self._usage is not None:
                self._usage.resume(read_metrics(self._metrics.path))
            self._interrupts.check(
                f"stopped before {self._step(self.finished_steps + 1)}; all before it is saved"
            )
            if hosts.is_first():
                self._lines = self._open_lines()
                self._lines.begin()
        return state, cursor

    def has_checkpoint(self, step: int) -> bool:
        """Whether `step` has a regular checkpoint."""
        return step % self._saves.every == 0 or step == self.steps

    def done(
        self,
        step: int,
        figures: Mapping[str, float],
        state: PyTree,
        cursor: Any,
    ) -> None:
        """Records a finished step, and saves the state if a checkpoint is due.

        Args:
            step: number of the step, from 1.
            figures: its metrics, with "loss".
            state: weights and optimizer state after the step.
            cursor: position in the data after the step, as JSON can hold it.

        Raises:
            ValueError: the loss, the gradient norm or a number of a state to save is not finite.
            CheckpointError: the checkpoint could not be written.
            Stopped: the run was asked to stop; the message says what is saved.
        """
        self._require_finite(step, figures)
        if self._usage is not None:
            figures = {**figures, **self._usage.metrics(figures)}
        row = self._metrics.write(self.name, step, figures)
        if self._lines is not None:
            self._lines.add(row)
        self._tick()
        signal_number = self._interrupts.agree()
        if signal_number is not None:
            self._require_time(signal_number, step)
        if signal_number is not None or self.has_checkpoint(step) or self._serves_restart(step):
            self._require_finite_state(step, state)
            with jax.profiler.TraceAnnotation("save"):
                self._saves.before()
                score = hosts.from_first(lambda: self._score(step))
                self._checkpoints.save(step, state, {**self._saves.meta, "cursor": cursor}, score)
            # A save begins when the one before it is complete.
            self._note_saved()
            self._saved = step
        if signal_number is not None:
            # The save may still be running in the background, but the message says it is done.
            self._checkpoints.wait()
            self._note_saved()
        if signal_number is not None or self.has_checkpoint(step):
            self._saves.after()
        if signal_number is not None:
            raise Stopped(
                signal_number,
                f"stopped after {self._step(step)}, which is saved",
            )

    def _serves_restart(self, step: int) -> bool:
        every = self._saves.restart_every
        return every > 0 and step % every == 0

    def _require_time(self, signal_number: int, step: int) -> None:
        """Raises Stopped if the machines may be taken before a save would be complete.

        All processes call it, and all or none of them raise. The first save is tried: nothing tells
        how long it takes, and one that is cut off leaves no trace.
        """
        times = hosts.gather((self._interrupts.seconds_left(), self._checkpoints.seconds))
        left = min((left for left, _ in times if left is not None), default=math.inf)
        needed = max((needed for _, needed in times if needed is not None), default=0.0)
        if needed > left:
            raise Stopped(
                signal_number,
                f"stopped after {self._step(step)}, which is not saved: a save takes about "
                f"{needed:.0f} s, and {max(left, 0):.0f} s are left; {self._kept()}",
            )

    def _kept(self) -> str:
        """The newest complete checkpoint in words."""
        newest = self._checkpoints.newest_now()
        if newest is None:
            return "the phase has no checkpoint yet"
        return f"the last checkpoint is {self._step(newest)}"

    def _note_saved(self) -> None:
        """Notes the last save, which has ended."""
        # A save that failed in the background has left no checkpoint.
        if self._saved and (self._checkpoints.newest_now() or 0) >= self._saved:
            self._history.saved(self.name, self._first, self._saved)

    def _step(self, step: int) -> str:
        """A step as the progress lines name it."""
        return f"{PHASE_TITLES[self.name]} {step}/{self.steps}"

    def _open_lines(self) -> StepLines:
        rows = read_metrics(self._metrics.path)
        return StepLines(
            self.name,
            self.steps,
            self._saves.every,
            [row for row in rows if row["phase"] == self.name],
            self._checkpoints.folder,
        )

    def _score(self, step: int) -> float | None:
        """Mean of the metric `best` since the last regular checkpoint; None between them."""
        # A run that is stopped saves between regular checkpoints. If such a checkpoint had a score,
        # the best one would depend on when the run was stopped.
        if self._saves.best is None or not self.has_checkpoint(step):
            return None
        previous_save = (step - 1) // self._saves.every * self._saves.every
        values = []
        # Read from disk: the steps may have run in an earlier process.
        for row in read_metrics(self._metrics.path):
            if row["phase"] == self.name and previous_save < row["step"] <= step:
                values.append(row[self._saves.best])
        return sum(values) / len(values)

    def _require_finite(self, step: int, figures: Mapping[str, float]) -> None:
        # A sum is finite only if both terms are.
        if not math.isfinite(figures["loss"] + figures.get("grad_norm", 0.0)):
            raise self._diverged(f"the loss of {self._step(step)} is not finite")

    def _require_finite_state(self, step: int, state: PyTree) -> None:
        """Ends the run before it saves what an update with a finite loss has destroyed."""
        destroyed = not_finite(state)
        if destroyed:
            raise self._diverged(f"after {self._step(step)}, {destroyed} is not finite")

    def _diverged(self, what: str) -> ValueError:
        newest = self._checkpoints.latest()
        good = "no step is saved"
        if newest is not None:
            good = f"the last finite checkpoint is {self._step(newest)}"
        return ValueError(
            f"{what}; {good}, and the same command computes the same again: {self._remedy()}"
        )

    def _remedy(self) -> str:
        """What helps against numbers that are not finite."""
        rates = "--align.learning-rate"
        if self.name != "align":
            section = "rl" if self.name == "rl" else "sft"
            rates = f"--{section}.optimizer.learning-rate"
        folder = self._checkpoints.folder.parent
        has_cold_start = self.name == "rl" and (folder / "sft").exists()
        kept = f"; --start {folder.parent} keeps the cold start" if has_cold_start else ""
        return f"lower {rates} in another --run-dir{kept}"
