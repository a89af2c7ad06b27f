"""Supervised steps on demonstrations: the cold start, and the control that goes on with them."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp

from models.compile_ahead import compile_ahead
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.processes import hosts
from rollout.agent.episode import Environment
from train.learn.sft import SFTBatches, SFTSettings, make_sft_updater, sft_step
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
    return _train(context, parts, environment, reader, weights, "sft", settings, context.run.seed)


def control(
    context: Context,
    parts: Parts,
    environment: Environment,
    reader: FrameReader | None,
    weights: Any,
) -> Any:
    """Train a copy of `weights` further, as a control for RL.

    The result shows what as many further steps on demonstrations reach; RL does not use it. The
    peak learning rates of the cold start would now undo part of what was learned, so the control
    has constant rates, a tenth of those.
    """
    sft, rl = context.run.sft, context.run.rl
    assert sft is not None and rl is not None, "a control continues a cold start beside RL"
    optimizer = dataclasses.replace(
        sft.optimizer,
        schedule="constant",
        warmup=0.0,
        learning_rate=sft.optimizer.learning_rate / 10,
    )
    settings = dataclasses.replace(sft, steps=rl.steps, horizon=0, optimizer=optimizer)
    # The update donates its input.
    copy = jax.tree.map(jnp.copy, weights)
    # Draw the rows in another order than the cold start did.
    seed = context.run.seed + 1
    return _train(context, parts, environment, reader, copy, "control", settings, seed)


def _train(
    context: Context,
    parts: Parts,
    environment: Environment,
    reader: FrameReader | None,
    weights: Any,
    name: str,
    settings: SFTSettings,
    seed: int,
) -> Any:
    config = parts.model.config
    batches = SFTBatches(settings, context.data, reader, seed, environment, context.mesh)
    updater = make_sft_updater(parts.skeleton, weights, settings, batches.shape)
    with context.open_phase(name, settings, environment.features.unreadable) as phase:
        state, cursor = resume(phase, updater.start, parts)
        if cursor is not None:
            batches.set_state(cursor)
        if phase.left:
            compile_ahead(batches.lowerings(updater, state), shown=hosts.is_first())
        for step in phase.each():
            start = time.perf_counter()
            # The measured time includes the update: its metrics are numbers here.
            state, lengths, metrics = sft_step(updater, state, batches, seed, phase.steps - step)
            seconds = time.perf_counter() - start
            metrics["time/step"] = seconds
            metrics |= speeds(lengths, config, seconds, context.mesh.size)
            phase.done(step, metrics, as_saved(state, parts), batches.get_state())
    return state.weights
