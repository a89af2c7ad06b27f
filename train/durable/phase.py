"""One phase of training: records its steps, saves checkpoints, resumes, and stops on request.

The order in which a step is written matters:

    metrics.jsonl (fsync)  ->  checkpoint, if one is due  ->  report  ->  stop, if requested

A kill between the first two leaves metrics without a checkpoint; the resumed phase removes them and
repeats the step. The reverse order could leave a checkpoint without its metrics. As it is,
metrics.jsonl holds each step once, and no step is repeated after a clean stop. A run in a bucket
pushes metrics.jsonl before each checkpoint (`train.durable.place`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxtyping import PyTree

from paravt_jax.processes import hosts
from train.durable.checkpoint import Checkpoints
from train.durable.history import History
from train.durable.interrupts import Interrupts, Stopped
from train.durable.metrics import PHASE_TITLES, MetricsWriter, read_metrics
from train.durable.step_lines import StepLines
from train.durable.time_left import Part

T = TypeVar("T")


class Phase:
    """A phase of training; a context manager that waits on exit until the last save is complete.

    Args:
        name: "align", "sft", "control" or "rl".
        steps: number of steps.
        save_every: steps between checkpoints; the last step is always saved.
        checkpoints: where the phase is saved and resumed from.
        metrics: where its metrics are recorded.
        interrupts: asked after every step whether to stop.
        history: the run's manifest, where saved steps are noted.
        meta: stored in each checkpoint beside the data cursor.
        tick: called after each step.
        before_save: called before each save; an exception from it prevents the save.
        after_save: called after each save, which may still run in the background.
        later: returns the parts of the run after this phase, for the time left.
        best: metric, higher is better, whose mean since the last regular checkpoint becomes the
            score of the next one.

    Attributes:
        finished_steps: steps in the newest checkpoint; 0 if there is none.
    """

    def __init__(
        self,
        name: str,
        steps: int,
        save_every: int,
        checkpoints: Checkpoints,
        metrics: MetricsWriter,
        interrupts: Interrupts,
        history: History,
        meta: Mapping[str, Any],
        tick: Callable[[], None] = lambda: None,
        before_save: Callable[[], None] = lambda: None,
        after_save: Callable[[], None] = lambda: None,
        later: Callable[[], Sequence[Part]] = lambda: (),
        best: str | None = None,
    ):
        self.name = name
        self.steps = steps
        self.save_every = save_every
        self.best = best
        # The first process decides for all: on a shared disk the others may see a new checkpoint
        # later than it does.
        self.finished_steps = hosts.gather(checkpoints.latest())[0] or 0
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._interrupts = interrupts
        self._history = history
        self._meta = dict(meta)
        self._tick = tick
        self._before_save = before_save
        self._after_save = after_save
        self._later = later
        self._first = self.finished_steps + 1
        # The step of the last save, which may still be running in the background.
        self._saved = 0
        # Opened by `resume`, in the first process only.
        self._lines: StepLines | None = None

    def __enter__(self) -> Phase:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpoints.close()
        self._note_saved()

    @property
    def left(self) -> range:
        """The steps still to do, counted from 1."""
        return range(self.finished_steps + 1, self.steps + 1)

    def resume(self, start: T) -> tuple[T, Any]:
        """Restores the newest checkpoint. Call it once, before the first step.

        Returns:
            The saved state and data cursor, or (`start`, None) if nothing was saved.

        Raises:
            CheckpointError: the checkpoint belongs to another run, model or vocabulary.
            RunDirectoryError: the newest checkpoint is lost, and the run cannot go on from another.
            Stopped: the run was asked to stop and has steps left.
        """
        state = start
        cursor = None
        if self.finished_steps:
            state, meta, _ = self._checkpoints.restore(start)
            cursor = meta["cursor"]
        if self.left:
            hosts.from_first(lambda: self._history.go_on(self.name, self.finished_steps))
            self._metrics.truncate(self.name, self.finished_steps)
            self._interrupts.check(
                f"stopped before {self._step(self.finished_steps + 1)}; all before it is saved"
            )
            if hosts.is_first():
                self._lines = self._open_lines()
                self._lines.begin()
        return state, cursor

    def saves(self, step: int) -> bool:
        """Whether `step` has a regular checkpoint. A run that is asked to stop saves one more."""
        return step % self.save_every == 0 or step == self.steps

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
            ValueError: the loss or the gradient norm is not finite.
            CheckpointError: the checkpoint could not be written.
            Stopped: the run was asked to stop; everything is saved by then.
        """
        self._require_finite(step, figures)
        row = self._metrics.write(self.name, step, figures)
        if self._lines is not None:
            self._lines.add(row)
        self._tick()
        signal_number = self._interrupts.agree()
        if signal_number is not None or self.saves(step):
            self._before_save()
            score = hosts.from_first(lambda: self._score(step))
            self._checkpoints.save(step, state, self._meta | {"cursor": cursor}, score)
            # A save begins when the one before it is complete.
            self._note_saved()
            self._saved = step
        if signal_number is not None:
            # The save may still be running in the background, but the message says it is done.
            self._checkpoints.wait()
            self._note_saved()
        if signal_number is not None or self.saves(step):
            self._after_save()
        if signal_number is not None:
            raise Stopped(
                signal_number,
                f"stopped after {self._step(step)}, which is saved",
            )

    def _note_saved(self) -> None:
        """Notes the last save, which is complete."""
        if self._saved:
            self._history.saved(self.name, self._first, self._saved)

    def _step(self, step: int) -> str:
        """A step as the progress lines name it."""
        return f"{PHASE_TITLES[self.name]} {step}/{self.steps}"

    def _open_lines(self) -> StepLines:
        rows = read_metrics(self._metrics.path)
        return StepLines(
            self.name,
            self.steps,
            self.save_every,
            [row for row in rows if row["phase"] == self.name],
            self._checkpoints.folder,
            self._later(),
        )

    def _score(self, step: int) -> float | None:
        """Mean of the metric `best` since the last regular checkpoint; None between them."""
        # A run that is stopped saves between regular checkpoints. If such a checkpoint had a score,
        # the best one would depend on when the run was stopped.
        if self.best is None or not self.saves(step):
            return None
        previous_save = (step - 1) // self.save_every * self.save_every
        values = []
        # Read from disk: the steps may have run in an earlier process.
        for row in read_metrics(self._metrics.path):
            if row["phase"] == self.name and previous_save < row["step"] <= step:
                values.append(row[self.best])
        return sum(values) / len(values)

    def _require_finite(self, step: int, figures: Mapping[str, float]) -> None:
        """Ends the run before it saves weights that a bad update has destroyed."""
        # A sum is finite only if both terms are.
        if not math.isfinite(figures["loss"] + figures.get("grad_norm", 0.0)):
            raise ValueError(
                f"{self.name}: the loss of step {step} is not finite; lower the learning rate in "
                "its settings (the last checkpoint is intact)"
            )
