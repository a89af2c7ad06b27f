"""The cold-start phase: supervised steps on demonstrations."""

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
    """Train `weights`, which are donated, and return the weights after the last step of SFT."""
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
            start = time.perf_counter()
            batch, arrays, counts = next(batches)
            state, metrics = update(state, batch)
            # float() waits for the update, so the measured time includes it.
            metrics = {name: float(value) for name, value in metrics.items()} | counts
            seconds = time.perf_counter() - start
            metrics["time/step"] = seconds
            metrics |= speeds(arrays, config, seconds, context.mesh.size)
            saved = as_saved(state, parts.tower)
            phase.done(step, metrics, saved, batches.get_state(), ("loss",))
    return state.weights
