"""What every phase of a run is given, and how a phase that trains is opened and resumed."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from train.data import Data
from train.durable import hosts
from train.durable.checkpoint import Checkpoints
from train.durable.interrupts import Interrupts
from train.durable.metrics import MetricsWriter
from train.durable.phase import Phase
from train.durable.run_directory import cold_start_identity, identity
from train.learn.align import AlignSettings
from train.learn.rl_settings import RLSettings
from train.learn.sft import SFTSettings
from train.learn.step import TrainState
from train.settings import Run
from train.unreadable import note_unreadable


@dataclasses.dataclass(frozen=True)
class Context:
    """A run's settings and data, where it writes, and who may stop it."""

    run: Run
    settings: dict[str, Any]
    """`run` as JSON, as it is stored beside each checkpoint."""
    folder: pathlib.Path
    data: Data
    mesh: Mesh
    origin: dict[str, Any]
    """What the run began with: the model's sizes, the vocabulary, published weights and rows."""
    param_dtype: str
    """The type of what is trained; the sampler's may be another."""
    metrics: MetricsWriter
    interrupts: Interrupts
    tick: Callable[[], None]
    """Called after each step and each evaluated setting."""

    def open_phase(
        self,
        name: str,
        settings: AlignSettings | SFTSettings | RLSettings,
        unreadable: dict[str, str],
    ) -> Phase:
        """The phase `name` with its checkpoints.

        Checkpoints of a cold start may be another run's with the same settings for it
        (`Run.start`). `unreadable` is noted before each save: video -> reason.
        """
        kept = self.run.checkpoints
        is_rl = name == "rl"
        decisive = identity(self.settings) if is_rl else cold_start_identity(self.settings)
        checkpoints = Checkpoints(
            self.folder / "checkpoints" / name,
            keep=kept.keep,
            asynchronous=True,
            identity={"settings": decisive, **self.origin},
        )

        def before_save() -> None:
            everywhere: dict[str, str] = {}
            for part in hosts.gather(unreadable):
                everywhere |= part
            note_unreadable(self.run, self.folder, self.data, everywhere)

        return Phase(
            name,
            settings.steps,
            settings.save_every,
            checkpoints,
            self.metrics,
            self.interrupts,
            meta={
                "settings": self.settings,
                "model": self.origin["model"],
                "vocabulary": self.origin["vocabulary"]["digest"],
                "param_dtype": self.param_dtype,
            },
            tick=self.tick,
            before_save=before_save,
            best=kept.best if is_rl and kept.best != "none" else None,
        )


def as_saved(state: TrainState, tower: Any) -> dict[str, Any]:
    """What a checkpoint of SFT or RL holds: the whole model, its frozen tower included, and the
    optimizer."""
    return {
        "vision": tower,
        "text": state.weights,
        "optimizer": state.optimizer,
        "step": state.step,
    }


def resume(phase: Phase, start: TrainState, tower: Any) -> tuple[TrainState, Any]:
    """The state that `phase` was left with and its data cursor; `start` and None where it begins.

    Where a state is restored, the arrays of `start` are deleted, as an update would donate them.
    """
    saved, cursor = phase.resume(as_saved(start, tower))
    if not phase.first:
        return start, cursor
    # Callers still name these arrays: dropping this reference would keep them beside the restored.
    for leaf in jax.tree.leaves(start):
        leaf.delete()
    return TrainState(saved["text"], saved["optimizer"], saved["step"]), cursor
