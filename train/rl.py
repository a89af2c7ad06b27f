"""PARA-GRPO, step by step: play episodes, lay out a batch, update, load the new weights, save.

A step depends on its number, the seed, the weights and the questions, and on nothing else. So a run
that was killed plays its last steps again from a checkpoint, bit for bit on the same machine if
frames are admitted at counted steps (`frames.admission`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from train.learn.packing import GroupLengths
from train.learn.rl import Learner
from train.learn.rollouts import (
    Questions,
    RolloutPool,
    Rollouts,
    begin,
    describe,
    require_fresh,
    roll_out,
)
from train.learn.update import TrainState
from train.learn.weight_sync import TrainedActor


class Trained(NamedTuple):
    """What a step was trained on, in the host's memory."""

    rollouts: Rollouts
    lengths: tuple[GroupLengths, ...]
    """Lengths of the trajectories."""
    advantages: Float[np.ndarray, "r u"]
    """Of every token; group p has the rollouts from p * group_size on."""


def train_rl(
    learner: Learner,
    actor: TrainedActor,
    questions: Questions,
    saver: Any,
    observer: Any,
    seed: int,
) -> Any:
    """Train with PARA-GRPO, from the newest checkpoint if there is one.

    Args:
        learner: Updates the weights.
        actor: Plays and scores episodes.
        questions: The questions of all steps.
        saver: A `train.durable.saver.Saver`, which restores and saves the state, and stops the run
            when that is asked for.
        observer: A `train.evaluations.Evaluator`, which looks at the run at regular checkpoints:
            before a step is saved at what it was trained on, afterwards at held-out questions.
        seed: Seed of the run.

    Returns:
        The weights after the last step.
    """
    settings = learner.settings
    pool = RolloutPool() if settings.max_staleness else None
    state, cursor = saver.restore(learner.initial)
    if cursor is not None:
        position, carried = cursor
        questions.set_state(position)
        if pool is not None:
            pool.state = carried
    if saver.left:
        actor.begin(learner, state, saver.finished_steps)
        # A run may have been stopped between a checkpoint and its evaluation.
        if saver.finished_steps and saver.is_regular(saver.finished_steps):
            observer.evaluate_step(saver.finished_steps)
    for step in saver.steps():
        state, trained, metrics = rl_step(state, learner, actor, questions, seed, pool)
        if saver.is_regular(step):
            observer.show(step, trained)
        carried = None if pool is None else pool.state
        cursor = (questions.get_state(), carried)
        updates = settings.updates_per_batch
        saver.done(step, state, metrics, cursor, trained.lengths, updates)
        if saver.is_regular(step) and step < settings.steps:
            observer.evaluate_step(step)
    actor.sleep()
    return state.weights


def rl_step(
    state: TrainState,
    learner: Learner,
    actor: TrainedActor,
    questions: Questions,
    seed: int,
    pool: RolloutPool | None = None,
) -> tuple[TrainState, Trained, dict[str, float]]:
    """Run one step of PARA-GRPO, and load the new weights into the sampler.

    The sampler sleeps after the rollouts until it gets the new weights: the update needs its
    memory.

    Args:
        state: The state before the step; donated.
        learner: Updates the weights.
        actor: Samples under the weights of `state`.
        questions: Gives the questions of the step.
        seed: Seed of the run.
        pool: Holds the episodes that outlive a step, if and only if `max_staleness` is above 0.

    Returns:
        The new state, what was trained on, and the step's metrics; times in seconds.

    Raises:
        ValueError: No question has a readable video, or a token was sampled under weights that
            `max_staleness` does not allow.
    """
    settings = learner.settings
    assert (pool is None) == (settings.max_staleness == 0), "see `pool`"
    step = int(state.step) // settings.updates_per_batch
    seconds: dict[str, float] = {}
    with timed("rollout", seconds):
        if pool is None:
            groups = begin(questions.draw(step), settings, seed, step)
            rollouts = roll_out(actor, groups, settings)
        else:
            rollouts = pool.play_step(actor, questions, settings, seed, step)
        actor.sleep()
    require_fresh(rollouts, step, settings.max_staleness)
    with timed("data", seconds):
        laid_out = learner.lay_out(rollouts, actor.environment, step)
    with timed("reference", seconds):
        batch = learner.score(laid_out)
    with timed("update", seconds):
        state, metrics = learner.update(state, batch)
        arrays = batch.step.laid_out
        trained = Trained(arrays.rollouts, arrays.lengths, np.asarray(batch.rollouts.advantages))
        # The sampler takes the memory of the batch, its frames' vectors above all.
        del batch, laid_out
        fingerprint = actor.load(state.weights, step + 1)
    metrics["weights/fingerprint"] = float(fingerprint)
    metrics |= describe(rollouts) | rollouts.metrics | arrays.metrics
    return state, trained, metrics | seconds


@contextlib.contextmanager
def timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Measure the block into `seconds[time/name]`; it is an event of this name in a trace."""
    begin = time.perf_counter()
    with jax.profiler.TraceAnnotation(name):
        yield
    seconds[f"time/{name}"] = time.perf_counter() - begin
