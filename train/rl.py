"""PARA-GRPO, step by step: play episodes, lay out a batch, update, load the new weights.

A step depends on its number, the seed, the weights and the questions, and on nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float

from paravt_jax.method.records import Question
from train.learn.packing import GroupLengths
from train.learn.rl import Learner
from train.learn.rl_settings import RLSettings
from train.learn.rollout_pool import RolloutPool
from train.learn.rollouts import (
    Rollouts,
    StepRollouts,
    describe,
    play_step,
    require_fresh,
    roll_out,
)
from train.learn.update import TrainState
from train.learn.weight_sync import Actor


class Trained(NamedTuple):
    """What a step was trained on, in the host's memory."""

    rollouts: Rollouts
    lengths: tuple[GroupLengths, ...]
    """Lengths of the trajectories."""
    advantages: Float[np.ndarray, "r u"]
    """Of every token; group p has the rows from p * group_size on, then come sub-agents."""


@runtime_checkable
class Questions(Protocol):
    """The questions of training, in an order that the seed fixes."""

    def draw(self, step: int, places: Sequence[int] | None = None) -> Sequence[Question]:
        """Draw a question for each place of a step, or for some of its places.

        Every process gets the same questions.
        """
        ...


def rl_step(
    state: TrainState,
    learner: Learner,
    actor: Actor,
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
    step = int(state.step) // settings.updates_per_batch
    spans = Spans()
    with spans("rollout"):
        sampled = _play(actor, questions, settings, (seed, step), pool)
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


def _play(
    actor: Actor,
    questions: Questions,
    settings: RLSettings,
    at: tuple[int, int],
    pool: RolloutPool | None,
) -> StepRollouts:
    """Play and score the episodes of a step; `at` is the seed and the number of the step."""
    fixed = (settings, *at, actor.judge)
    step = at[1]
    further = functools.partial(questions.draw, step)
    assert (pool is None) == (settings.max_staleness == 0), "see `pool`"
    if pool is not None:
        drawn = questions.draw(step)
        return pool.play_step(actor.sampler, actor.environment, drawn, *fixed, further)

    def play_some(questions: Sequence[Question], **places: Any) -> Rollouts:
        return roll_out(actor.sampler, actor.environment, questions, *fixed, **places)

    return play_step(play_some, questions.draw(step), further, settings)


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
