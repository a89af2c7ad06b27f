"""Takes single steps of RL, as `train.rl` does, with any sampler and given questions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from models.trained import Skeleton, split_vision
from paravt_jax.method.accuracy import Rules
from paravt_jax.method.judge import Judge
from paravt_jax.method.records import Question
from train.learn.packing import StepShape
from train.learn.rl import Learner
from train.learn.rl_settings import RLSettings
from train.learn.rollouts import RolloutPool
from train.learn.update import TrainState
from train.learn.weight_sync import TrainedActor, WeightSync
from train.rl import Trained, rl_step


@dataclasses.dataclass
class Given:
    """Questions that are given."""

    questions: Sequence[Question]

    def draw(self, step: int) -> Sequence[Question]:
        return self.questions

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """There is no position."""


def skeleton_of(road: Any, **mesh: int) -> Skeleton:
    """The model of a road without its trained weights, on a mesh."""
    return Skeleton(road.graph, road.base(**mesh), road.environment.features.trained)


def road_learner(
    road: Any, settings: RLSettings | None = None, shape: StepShape | None = None, **mesh: int
) -> Learner:
    """A learner of a road's model, by default with its settings."""
    run = road.run
    return Learner(
        skeleton_of(road, **mesh),
        road.fresh(**mesh),
        road.model.config,
        settings or run.rl,
        shape or run.rl_shape,
    )


def actor_of(
    learner: Learner, sampler: Any, environment: Any, judge: Judge | None = None
) -> TrainedActor:
    """An actor whose sampler gets the weights of this learner."""
    skeleton, weights = learner.skeleton, learner.initial.weights
    kept: Any = learner
    if not hasattr(kept, "sync"):
        # Made once: it compiles.
        dtype = skeleton.decoder(split_vision(weights)[0]).dtype
        kept.sync = WeightSync(weights, dtype, skeleton.frozen)
    return TrainedActor(sampler, environment, judge or Rules(), kept.sync)


def take_step(
    learner: Learner,
    state: TrainState,
    sampler: Any,
    environment: Any,
    questions: Sequence[Question] | Any,
    seed: int = 0,
    pool: RolloutPool | None = None,
) -> tuple[TrainState, dict[str, float]]:
    """One step on some questions, or on those of a stream: the new state, and the metrics."""
    state, _, metrics = take_whole_step(learner, state, sampler, environment, questions, seed, pool)
    return state, metrics


def take_whole_step(
    learner: Learner,
    state: TrainState,
    sampler: Any,
    environment: Any,
    questions: Sequence[Question] | Any,
    seed: int = 0,
    pool: RolloutPool | None = None,
) -> tuple[TrainState, Trained, dict[str, float]]:
    """The same with the rollouts that were trained."""
    stream: Any = questions if hasattr(questions, "draw") else Given(questions)
    actor = actor_of(learner, sampler, environment)
    return rl_step(state, learner, actor, stream, seed, pool)
