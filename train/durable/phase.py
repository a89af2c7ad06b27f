"""One phase of training from the step it was left at to its last: what is written down of a step, when it is saved, when it stops.

Owns the order in which a step leaves its traces. Figures come first, then the checkpoint where one is due, so none is ahead of
metrics.jsonl; a phase that goes on forgets the figures beyond its checkpoint. Saving is decided here and stopping in
`train.durable.interrupts`, each in one place. Invariant: a step is in metrics.jsonl once, and after a clean stop none is done again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxtyping import PyTree

from paravt_jax.progress import Progress
from train.durable import hosts
from train.durable.checkpoint import Checkpoints
from train.durable.interrupts import Interrupts, Stopped
from train.durable.metrics import MetricsWriter, read_metrics

T = TypeVar("T")

_TITLES = {"align": "align the vision tower", "sft": "cold start", "rl": "PARA-GRPO"}


class Phase:
    """The phase `name` of `steps` steps, saved every `save_every` and at its end; a context manager that waits for what is being saved.

    `tick` is called at each step, `before_save` ahead of each save, which it may refuse; `meta` stands in each checkpoint beside the
    cursor. `best` names the figure, the larger the better, whose mean since the last regular save scores a checkpoint.
    """

    def __init__(
        self,
        name: str,
        steps: int,
        save_every: int,
        checkpoints: Checkpoints,
        metrics: MetricsWriter,
        interrupts: Interrupts,
        meta: Mapping[str, Any],
        tick: Callable[[], None] = lambda: None,
        before_save: Callable[[], None] = lambda: None,
        best: str | None = None,
    ):
        self.name, self.steps, self.save_every, self.best = name, steps, save_every, best
        self.first = (
            hosts.gather(checkpoints.latest())[0] or 0
        )  # what the first sees: a shared disk may show it to others later
        self._checkpoints, self._metrics, self._interrupts = checkpoints, metrics, interrupts
        self._meta, self._tick, self._before_save = dict(meta), tick, before_save
        self._progress = Progress(_TITLES[name], shown=hosts.is_first())

    def __enter__(self) -> Phase:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()
        self._checkpoints.close()

    @property
    def left(self) -> range:
        """Numbers of the steps that are still to do."""
        return range(self.first + 1, self.steps + 1)

    def resume(self, start: T) -> tuple[T, Any]:
        """The state after step `first` and the data cursor then: what was saved, or (`start`, None) where nothing was.

        Call it once, before the first step. Raises CheckpointError for a checkpoint of another run, model or vocabulary, and Stopped where
        there are steps to do and the run was asked to stop.
        """
        state, cursor = start, None
        if self.first:
            state, meta, _ = self._checkpoints.restore(start)
            cursor = meta["cursor"]
        if self.left:
            self._metrics.truncate(self.name, self.first)
            self._interrupts.check(
                f"stopped before step {self.first + 1} of {self.steps} of {self.name}; all before it is saved"
            )
        return state, cursor

    def saves(self, step: int) -> bool:
        """Whether a checkpoint of `step` is due; a run that is asked to stop saves another one."""
        return step % self.save_every == 0 or step == self.steps

    def done(
        self,
        step: int,
        figures: Mapping[str, float],
        state: PyTree,
        cursor: Any,
        shown: tuple[str, ...],
    ) -> None:
        """Keeps a step that is done: its figures, those `shown` on the terminal, and where due the state and the cursor.

        Raises ValueError for a loss that is not a number, CheckpointError where the disk refuses, and Stopped, once all that is saved,
        where the run was asked to stop.
        """
        self._require_finite(step, figures)
        self._metrics.write(self.name, step, figures)
        self._progress.update(step, self.steps, {name: figures[name] for name in shown})
        self._tick()
        number = self._interrupts.agree()
        if number is not None or self.saves(step):
            self._before_save()
            score = hosts.from_first(lambda: self._score(step))
            self._checkpoints.save(step, state, self._meta | {"cursor": cursor}, score)
        if number is not None:
            self._checkpoints.wait()
            raise Stopped(
                number, f"stopped after step {step} of {self.steps} of {self.name}, which is saved"
            )

    def _score(self, step: int) -> float | None:
        """Of a regular checkpoint: what a stop saved must not change which is the best."""
        if self.best is None or not self.saves(step):
            return None
        span = range((step - 1) // self.save_every * self.save_every + 1, step + 1)
        values = [
            row[self.best]
            for row in read_metrics(self._metrics.path)
            if row["phase"] == self.name and row["step"] in span
        ]
        return sum(values) / len(values)

    def _require_finite(self, step: int, figures: Mapping[str, float]) -> None:
        """A loss that is not a number has spoilt the weights: better to end here than to save them."""
        if not math.isfinite(figures["loss"] + figures.get("grad_norm", 0.0)):
            raise ValueError(
                f"{self.name}: the loss of step {step} is not finite; lower the learning rate in its settings, the last checkpoint is sound"
            )
