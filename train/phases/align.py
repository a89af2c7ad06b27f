"""The alignment phase: a fresh vision tower learns to see."""

from __future__ import annotations

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from models.model import VisionLanguageModel
from train.learn import align as learner
from train.phases.context import Context


def align(context: Context, model: VisionLanguageModel) -> None:
    """Train the vision tower of `model` in place, from the phase's last checkpoint if any."""
    settings, data = context.run.align, context.data
    if settings is None:
        return
    # The tiny model is replicated: every process trains the whole model.
    whole = NamedSharding(context.mesh, PartitionSpec())
    nnx.update(model, jax.device_put(nnx.state(model), whole))
    unreadable: dict[str, str] = {}
    with context.open_phase("align", settings, unreadable) as phase:
        learner.align(
            model,
            data.captions,
            data.vocabulary,
            data.root,
            context.run.frames.rules(model.config.vision),
            settings,
            context.run.seed,
            phase,
            unreadable,
        )
