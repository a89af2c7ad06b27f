"""Saves the steps of one phase of training: metrics and checkpoints. Stops the run when asked to.

The order in which a step is written matters:

    metrics.jsonl (fsync)  ->  checkpoint, if one is due  ->  report  ->  stop, if requested

A kill between the first two leaves metrics without a checkpoint; the resumed phase removes them and
repeats the step. The reverse order could leave a checkpoint without its metrics. As it is,
metrics.jsonl holds each step once, and a clean stop repeats no step. A run in a bucket pushes
metrics.jsonl before each checkpoint (`train.durable.place`). A checkpoint holds the checksum of the
lines up to its step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax

from paravt_jax.processes import hosts
from train.durable.checkpoint import Checkpoints, DamagedCheckpointError
from train.durable.finite import not_finite
from train.durable.home import Home
from train.durable.interrupts import Stopped
from train.durable.metrics import PHASE_TITLES, PHASES, read_metrics
from train.durable.run_directory import RunDirectoryError, cold_start_identity, identity
from train.durable.step_lines import StepLines, say
from train.durable.stored_records import pack, unpack
from train.evaluation_file import forget_after
from train.learn.packing import GroupLengths

T = TypeVar("T")

_BACKUP = "restore it from a backup, or start anew with another --run-dir."


@runtime_checkable
class Form(Protocol):
    """How states of training are stored."""

    def as_saved(self, state: Any) -> Any:
        """Return the arrays to store, or their shapes."""
        ...

    def as_trained(self, saved: Any) -> Any:
        """Return the state that was stored as `saved`."""
        ...


@runtime_checkable
class Steps(Protocol):
    """Settings of a phase, as far as they say when it is saved."""

    @property
    def steps(self) -> int:
        """Number of steps."""
        ...

    @property
    def save_every(self) -> int:
        """Steps between regular checkpoints. The last step always has one."""
        ...


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a run starts from, by content. Checkpoints from another origin are refused."""

    content: dict[str, Any]
    """Vocabulary, sizes of the model, and digests of published data and weights, as JSON."""
    param_dtype: str
    """Type of the trained weights. The sampler's may differ."""


class Saver:
    """Saves one phase; a context manager that waits on exit until the last save is complete.

    Args:
        name: `align`, `sft` or `rl`.
        settings: When the phase is saved, and its number of steps.
        home: Where the run records what it does.
        checkpoints: Where the phase is saved and resumed from.
        meta: Stored in each checkpoint beside the data cursor.
        form: The form in which states are stored; None: as they are.

    Attributes:
        finished_steps: Steps in the newest checkpoint; 0 if there is none.
    """

    def __init__(
        self,
        name: str,
        settings: Steps,
        home: Home,
        checkpoints: Checkpoints,
        meta: Mapping[str, Any],
        form: Form | None = None,
    ):
        self.name = name
        self._settings = settings
        self._home = home
        self._checkpoints = checkpoints
        self._meta = meta
        self._form = form
        self._trace = contextlib.ExitStack()
        # The first process decides for all: on a shared disk the others may see a new checkpoint
        # later than it does.
        self.finished_steps: int = hosts.gather(checkpoints.latest())[0] or 0
        # Opened by `restore`, in the first process only.
        self._lines: StepLines | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None and issubclass(kind, Exception)
        if failed and hosts.process_count() > 1:
            # Other processes may have no part in a save any more, which would then never complete.
            return
        self._checkpoints.close()
        self._trace.close()

    @property
    def left(self) -> range:
        """The steps still to do, counted from 1."""
        return range(self.finished_steps + 1, self._settings.steps + 1)

    def steps(self) -> Iterator[int]:
        """Yield the steps of `left`, of which one is traced (`Run.profile`). Each ends with `done`.

        Every process writes its trace into RUN/profile/PHASE/process-N.
        """
        for step in self.left:
            if step == self._home.profile:
                folder = self._home.folder / "profile" / self.name
                options = jax.profiler.ProfileOptions()
                # Calls of Python functions would be most of the events, and slow the step down.
                options.python_tracer_level = 0
                trace = jax.profiler.trace(
                    folder / f"process-{hosts.process_index()}", profiler_options=options
                )
                self._trace.enter_context(trace)
            self._home.usage.reset()
            with jax.profiler.StepTraceAnnotation(self.name, step_num=step):
                yield step
            self._trace.close()

    def restore(self, start: T) -> tuple[T, Any]:
        """Restore the newest checkpoint. Call it once, before the first step.

        Args:
            start: The state before the first step. Its arrays are deleted if another is restored.

        Returns:
            The saved state and data cursor, or `start` and None if nothing was saved.

        Raises:
            CheckpointError: The checkpoint belongs to another run, model or vocabulary.
            RunDirectoryError: metrics.jsonl is damaged, or the run cannot go on from another
                checkpoint than the lost one.
            Stopped: The run was asked to stop and has steps left.
        """
        state = start
        cursor = None
        if self.finished_steps:
            state, cursor = self._read(start)
        if self.left:
            self._go_on()
        return state, cursor

    def is_regular(self, step: int) -> bool:
        """Return whether `step` has a regular checkpoint."""
        return step % self._settings.save_every == 0 or step == self._settings.steps

    def done(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, float],
        cursor: Any,
        lengths: Sequence[GroupLengths] = (),
    ) -> None:
        """Record a finished step, and save the state if a checkpoint is due.

        Args:
            step: Number of the step, from 1.
            state: Weights and optimizer state after the step.
            metrics: Those of the step, with "loss".
            cursor: Position in the data after the step, as `train.durable.stored_records` can hold
                it.
            lengths: Lengths of the sequences of its updates, which tell their speed.

        Raises:
            ValueError: The loss, the gradient norm or a number of a state to save is not finite.
            CheckpointError: The checkpoint could not be written.
            Stopped: The run was asked to stop; the message says what is saved.
        """
        self._require_finite(step, metrics)
        measured = self._home.usage.metrics(metrics, lengths)
        row = self._home.metrics.write(self.name, step, {**metrics, **measured})
        if self._lines is not None:
            self._lines.add(row)
        asked = self._home.interrupts.agree()
        is_reported = asked is not None or self.is_regular(step)
        if is_reported:
            self._save(step, state, cursor)
            if asked is not None:
                # The save may still be running in the background, but the message says it is done.
                self._checkpoints.wait()
            self._home.report()
        if asked is not None:
            raise Stopped(asked, f"stopped after {self._step(step)}, which is saved")

    def _read(self, start: Any) -> tuple[Any, Any]:
        """Return the state and the cursor of the newest checkpoint; see `restore`."""
        template = start if self._form is None else self._form.as_saved(start)
        template = jax.tree.map(_shape, template)
        # Both states together might not fit into the memory of the devices.
        for leaf in jax.tree.leaves(start):
            leaf.delete()
        try:
            saved, meta, _ = self._checkpoints.restore(template, self.finished_steps)
        except DamagedCheckpointError as damage:
            # Two damaged ones in a row are rather a fault of the machine.
            if hosts.from_first(self._made_later):
                raise
            self.finished_steps = self._checkpoints.set_aside(damage)
            saved, meta, _ = self._checkpoints.restore(template, self.finished_steps)
        found = self._metrics_sum(self.finished_steps)
        # The cold start of another run has its metrics there.
        is_own = self.name not in ("align", "sft") or not self._home.config.get("start")
        if is_own and found != meta["metrics"]:
            raise RunDirectoryError(
                f"{self._home.metrics.path}: damaged: the lines up to "
                f"{self._step(self.finished_steps)} are not those that were saved: {_BACKUP}"
            )
        state = saved if self._form is None else self._form.as_trained(saved)
        return state, unpack(meta["cursor"])

    def _go_on(self) -> None:
        """Forget what earlier processes did after the newest checkpoint, and announce the steps."""
        home = self._home
        hosts.from_first(self._require_last)
        home.metrics.truncate(self.name, self.finished_steps)
        if hosts.is_first():
            forget_after(home.folder, self.name, self.finished_steps)
        home.interrupts.check(
            f"stopped before {self._step(self.finished_steps + 1)}; all before it is saved"
        )
        if hosts.is_first():
            say(
                f"{self._step(self.finished_steps + 1)} is next; the first step after a start "
                "compiles"
            )
            self._lines = StepLines(self._settings.steps)

    def _require_last(self) -> None:
        """Raise RunDirectoryError if something was made from steps that would be trained again."""
        made = self._made_later()
        if made:
            raise RunDirectoryError(
                f"{self._checkpoints.folder / str(self._settings.steps)}: lost, but "
                f"{' and '.join(made)} in {self._home.folder} was made from it: {_BACKUP}"
            )

    def _made_later(self) -> list[str]:
        """Return what was made from the last step of this phase: later phases, exports."""
        later = PHASES[PHASES.index(self.name) + 1 :]
        rows = read_metrics(self._home.metrics.path)
        made = [name for name in later if any(row["phase"] == name for row in rows)]
        return made + [name for name in ("model", "adapter") if (self._home.folder / name).exists()]

    def _metrics_sum(self, step: int) -> int:
        """Return the checksum of the metrics up to a step."""
        return hosts.from_first(lambda: self._home.metrics.checksum(self.name, step))

    def _save(self, step: int, state: Any, cursor: Any) -> None:
        if self._form is not None:
            state = self._form.as_saved(state)
        destroyed = not_finite(state)
        if destroyed:
            # An update with a finite loss has destroyed it.
            raise self._diverged(f"after {self._step(step)}, {destroyed} is not finite")
        with jax.profiler.TraceAnnotation("save"):
            self._home.check()
            self._home.place.push()
            score = hosts.from_first(lambda: self._score(step))
            meta = {**self._meta, "cursor": pack(cursor), "metrics": self._metrics_sum(step)}
            self._checkpoints.save(step, state, meta, score)

    def _step(self, step: int) -> str:
        """Return a step as the progress lines name it."""
        return f"{PHASE_TITLES[self.name]} {step}/{self._settings.steps}"

    def _score(self, step: int) -> float | None:
        """Return the mean accuracy since the last regular checkpoint, which picks the best."""
        # A run that is stopped saves between regular checkpoints. If such a checkpoint had a score,
        # the best one would depend on when the run was stopped.
        if self.name != "rl" or not self.is_regular(step):
            return None
        every = self._settings.save_every
        previous_save = (step - 1) // every * every
        # Read from disk: the steps may have run in an earlier process.
        values = [
            row["accuracy"]
            for row in read_metrics(self._home.metrics.path)
            if row["phase"] == self.name and previous_save < row["step"] <= step
        ]
        return sum(values) / len(values)

    def _require_finite(self, step: int, metrics: Mapping[str, float]) -> None:
        # A sum is finite only if both terms are.
        if not math.isfinite(metrics["loss"] + metrics.get("grad_norm", 0.0)):
            raise self._diverged(f"the loss of {self._step(step)} is not finite")

    def _diverged(self, what: str) -> ValueError:
        newest = self._checkpoints.latest()
        good = "no step is saved"
        if newest is not None:
            good = f"the last finite checkpoint is {self._step(newest)}"
        return ValueError(
            f"{what}; {good}, and the same command computes the same again: lower the learning "
            "rate in another --run-dir (--start takes over a finished cold start)"
        )


def _shape(leaf: Any) -> Any:
    """Return the shape, type and sharding of an array on devices; others stay as they are."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def open_saver(
    name: str, settings: Steps, home: Home, origin: Origin, form: Form | None = None
) -> Saver:
    """Open a phase with its checkpoints.

    Args:
        name: `align`, `sft` or `rl`.
        settings: Settings of the phase.
        home: The run.
        origin: What the run starts from.
        form: The form in which states are stored; None: as they are.
    """
    # Another run may take over a cold start (`Run.start`), so its checkpoints record only the
    # settings that affect a cold start.
    recorded = identity(home.config) if name == "rl" else cold_start_identity(home.config)
    checkpoints = Checkpoints(
        home.place.checkpoints / name,
        asynchronous=True,
        identity={"settings": recorded, **origin.content},
    )
    meta = {
        "settings": home.config,
        "model": origin.content["model"],
        "vocabulary": origin.content["vocabulary"]["digest"],
        "param_dtype": origin.param_dtype,
        "base_fingerprint": origin.content.get("base_fingerprint"),
    }
    return Saver(name, settings, home, checkpoints, meta, form)
