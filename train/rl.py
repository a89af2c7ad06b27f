"""PARA-GRPO, step by step: play episodes, lay out a batch, update, load the new weights.

A step depends on its number, the seed, the weights and the questions, and on nothing else.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from train.learn.packing import GroupLengths
from train.learn.rl import Learner
from train.learn.rollout_pool import RolloutPool
from train.learn.rollouts import Questions, Rollouts, describe, play_step, require_fresh
from train.learn.update import TrainState
from train.learn.weight_sync import TrainedActor


class Trained(NamedTuple):
    """What a step was trained on, in the host's memory."""

    rollouts: Rollouts
    lengths: tuple[GroupLengths, ...]
    """Lengths of the trajectories."""
    advantages: Float[np.ndarray, "r u"]
    """Of every token; group p has the rows from p * group_size on, then come sub-agents."""


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
        questions: Questions of the step, and further ones for dynamic sampling.
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
    spans = Spans()
    with spans("rollout"):
        play = play_step if pool is None else pool.play_step
        sampled = play(actor, questions, settings, seed, step)
        actor.sleep()
    require_fresh(sampled.batch, step, settings.max_staleness)
    with spans("data"):
        laid_out = learner.lay_out(sampled.batch, actor.environment, seed, step)
    with spans("reference"):
        batch = learner.score(laid_out)
    with spans("update"):
        state, metrics = learner.update(state, batch, seed, step)
        arrays = batch.laid_out
        trained = Trained(arrays.rollouts, arrays.lengths, np.asarray(batch.rollouts.advantages))
        # The sampler takes the memory of the batch, its frames' vectors above all.
        del batch, laid_out
        fingerprint = actor.load(state.weights, step + 1)
    metrics["weights/fingerprint"] = float(fingerprint)
    metrics |= describe(sampled.drawn) | sampled.metrics | arrays.metrics
    metrics |= {f"time/{name}": seconds for name, seconds in spans.seconds.items()}
    return state, trained, metrics


class Spans:
    """The parts of a step, in its metrics and in a trace (`train.durable.profile`).

    Attributes:
        seconds: How long each part took, by name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the block, which is an event of this name in a trace."""
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(name):
            yield
        self.seconds[name] = time.perf_counter() - start
