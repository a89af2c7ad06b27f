"""The cold start, step by step: draw packed demonstrations, update."""

from __future__ import annotations

import time
from typing import Any

from models.compilation import compile_ahead
from paravt_jax.processes import hosts
from train.durable.saver import Saver
from train.learn.sft import SFTBatches, make_sft_updater, sft_step
from train.model import Parts


def train_sft(parts: Parts, weights: Any, batches: SFTBatches, saver: Saver) -> Any:
    """Train `weights`, which are donated, from the newest checkpoint if there is one.

    Args:
        parts: The model without its trained weights.
        weights: The trained weights before the first step.
        batches: Demonstrations in packed rows.
        saver: Restores and saves the state, and stops the run when that is asked for.

    Returns:
        The weights after the last step.
    """
    settings = batches.settings
    updater = make_sft_updater(parts.skeleton, weights, settings, batches.shape)
    state, cursor = saver.restore(updater.initial)
    if cursor is not None:
        batches.set_state(cursor)
    if saver.left:
        compile_ahead(batches.lowerings(updater, state), shown=hosts.is_first())
    for step in saver.steps():
        begin = time.perf_counter()
        # The measured time includes the update: its metrics are numbers here.
        left = settings.steps - step
        state, lengths, metrics = sft_step(updater, state, batches, left)
        metrics["time/step"] = time.perf_counter() - begin
        saver.done(step, state, metrics, batches.get_state(), lengths)
    return state.weights
