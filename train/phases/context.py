"""The context that every phase of a run gets, and how a training phase is opened and resumed."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from models.trained import apart, together
from paravt_jax.processes import hosts
from train.data import Data
from train.durable.checkpoint import Checkpoints
from train.durable.history import History
from train.durable.interrupts import Interrupts
from train.durable.metrics import MetricsWriter
from train.durable.phase import Phase, Saves
from train.durable.place import Place
from train.durable.profile import Profiler, parse_steps
from train.durable.run_directory import cold_start_identity, identity
from train.durable.usage import Usage
from train.learn.align import AlignSettings
from train.learn.rl_settings import RLSettings
from train.learn.sft import SFTSettings
from train.learn.update import TrainState
from train.left_out import note_unreadable
from train.phases.model import Parts
from train.settings import Run


@dataclasses.dataclass(frozen=True)
class Context:
    """Settings, data, output and interrupts of a run."""

    run: Run
    settings: dict[str, Any]
    """`run` as JSON; stored beside each checkpoint."""
    place: Place
    """Where the run lives."""
    data: Data
    mesh: Mesh
    origin: dict[str, Any]
    """The run's starting point: sizes of the model, vocabulary, published weights and data."""
    param_dtype: str
    """Type of the trained weights. The sampler's may differ."""
    metrics: MetricsWriter
    interrupts: Interrupts
    history: History
    """The manifest of what the run has finished."""
    tick: Callable[[], None]
    """Called after each step and each evaluated setting."""
    usage: Usage
    """Metrics of every step: memory, compiling and goodput."""
    after_save: Callable[[], None] = lambda: None
    """Called after each save and each evaluation, in every process: writes the report so far."""

    @property
    def folder(self) -> pathlib.Path:
        """The folder of the run's files, without checkpoints."""
        return self.place.folder

    def open_phase(
        self,
        name: str,
        settings: AlignSettings | SFTSettings | RLSettings,
        unreadable: dict[str, str],
    ) -> Phase:
        """Open a phase with its checkpoints.

        Args:
            name: `align`, `sft`, `control` or `rl`.
            settings: The settings of the phase.
            unreadable: Videos that cannot be read, each with the reason; written before each save.
        """
        kept = self.run.checkpoints
        is_rl = name == "rl"
        # Another run may take over a cold start (`Run.start`), so its checkpoints record only the
        # settings that affect a cold start.
        recorded = identity(self.settings) if is_rl else cold_start_identity(self.settings)
        checkpoints = Checkpoints(
            self.place.checkpoints / name,
            keep=kept.keep,
            asynchronous=True,
            identity={"settings": recorded, **self.origin},
        )

        def before_save() -> None:
            # Processes decode different videos, so each may know of other unreadable ones.
            everywhere: dict[str, str] = {}
            for part in hosts.gather(unreadable):
                everywhere |= part
            note_unreadable(self.run, self.folder, self.data, everywhere)
            self.place.push()

        saves = Saves(
            checkpoints,
            every=settings.save_every,
            meta={
                "settings": self.settings,
                "model": self.origin["model"],
                "vocabulary": self.origin["vocabulary"]["digest"],
                "param_dtype": self.param_dtype,
                "base_fingerprint": self.origin.get("base_fingerprint"),
            },
            restart_every=self._restart_every(),
            best=kept.best if is_rl and kept.best != "none" else None,
            before=before_save,
            after=self.after_save,
        )
        return Phase(
            name,
            settings.steps,
            saves,
            self.metrics,
            self.interrupts,
            self.history,
            tick=self.tick,
            profiler=self._profiler(name),
            usage=self.usage,
        )

    def _profiler(self, phase: str) -> Profiler | None:
        steps = parse_steps(self.run.profile)
        return Profiler(self.folder / "profile" / phase, steps) if steps else None

    def _restart_every(self) -> int:
        """Steps between checkpoints that only serve a restart; 0: none."""
        adapters_alone = self.run.lora is not None and self.run.train_vision == "none"
        return self.run.checkpoints.every or int(adapters_alone)


def as_saved(state: TrainState, parts: Parts) -> dict[str, Any]:
    """The state that a checkpoint of SFT or RL stores: trained weights and the optimizer.

    If the whole decoder is trained, it also stores the whole tower: together they are the model.
    Adapters belong to a base that is elsewhere, and whose fingerprint is part of the run's starting
    point. Beside them are the weights of the tower that are trained, if any.
    """
    text, vision = apart(state.weights)
    saved = {"text": text, "optimizer": state.optimizer, "step": state.step}
    if not jax.tree.leaves(parts.frozen):
        return {"vision": parts.tower_with(vision), **saved}
    return saved if vision is None else {"vision": vision, **saved}


def resume(phase: Phase, start: TrainState, parts: Parts) -> tuple[TrainState, Any]:
    """Restore the state and the data cursor of `phase`.

    If a state is restored, the arrays of `start` are deleted.

    Returns:
        The state and the cursor; `start` and None if the phase has no checkpoint.
    """
    saved, cursor = phase.resume(as_saved(start, parts))
    if not phase.finished_steps:
        return start, cursor
    # Callers still refer to these arrays, so without deletion both states would be in memory.
    for leaf in jax.tree.leaves(start):
        leaf.delete()
    weights = together(saved["text"], parts.trained_of(saved.get("vision")))
    return TrainState(weights, saved["optimizer"], saved["step"]), cursor
