"""The cold start: supervised steps on demonstrations."""

from __future__ import annotations

import time
from typing import Any

from paravt_jax.data.frame_reader import FrameReader
from rollout.agent.episode import Environment
from train.learn.sft import SFTBatches
from train.learn.speed import speeds
from train.phases.context import Context, as_saved, resume
from train.phases.model import Parts


def cold_start(
    context: Context,
    parts: Parts,
    environment: Environment,
    reader: FrameReader | None,
    weights: Any,
) -> Any:
    """The weights after the last step of SFT. Those given are donated."""
    settings = context.run.sft
    if settings is None:
        return weights
    config = parts.model.config
    batches = SFTBatches(
        settings,
        context.data,
        reader,
        context.run.seed,
        environment.protocol,
        environment.features,
        context.mesh,
    )
    state, update = batches.start(parts.graph, weights)
    with context.open_phase("sft", settings, environment.features.unreadable) as phase:
        state, cursor = resume(phase, state, parts.tower)
        if cursor is not None:
            batches.set_state(cursor)
        for step in phase.left:
            clock = time.perf_counter()
            batch, arrays, counts = next(batches)
            state, figures = update(state, batch)
            figures = {name: float(value) for name, value in figures.items()} | counts
            seconds = time.perf_counter() - clock
            figures["time/step"] = seconds
            figures |= speeds(arrays, config, seconds, context.mesh.size)
            kept = as_saved(state, parts.tower)
            phase.done(step, figures, kept, batches.get_state(), ("loss",))
    return state.weights
