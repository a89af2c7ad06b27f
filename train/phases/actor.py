"""Builds the parts of a run that encode frames and play episodes."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx

from models.features import FrameFeatures
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.method.scoring import rules_of
from paravt_jax.remote.judge import RemoteJudge
from rollout.agent.episode import Environment
from rollout.engine.engine import Engine
from train.data import Data
from train.learn.weight_sync import TrainedActor, WeightSync
from train.phases.model import Parts, drop_weights
from train.settings import Run


@dataclasses.dataclass(frozen=True)
class EngineActor(TrainedActor):
    """An actor of a run, whose sampler is the engine."""

    sampler: Engine
    remote: RemoteJudge | None = None
    """The judge, if it is a model."""


def open_environment(run: Run, data: Data, parts: Parts, reader: FrameReader) -> Environment:
    """Build the protocol and the encoder of frames.

    Args:
        run: The settings.
        data: Gives the vocabulary and the directory of videos.
        parts: The model, whose vision tower is on this process's devices.
        reader: Reads the videos.
    """
    model = parts.model
    features = FrameFeatures(
        model.vision, model.config, run.frames, data.root, source=reader, trained=parts.vision
    )
    return Environment(Protocol(data.vocabulary, run.protocol), features)


def open_actor(
    run: Run, parts: Parts, environment: Environment, judge: RemoteJudge | None, weights: Any
) -> EngineActor | None:
    """Open an actor that sleeps until `load`; None for a run that plays no episodes.

    Args:
        run: The settings.
        parts: The model without its trained weights.
        environment: The protocol, and the frames' features.
        judge: Scores open-ended answers; None: rules score them.
        weights: The weights that are trained, on the mesh of training.
    """
    if not run.plays_episodes:
        return None
    model = parts.model
    sync = WeightSync(weights, model.text.dtype, parts.frozen)
    # The engine takes its first weights from the model, and keeps the frozen ones.
    nnx.update(model.text, sync(weights), sync.base)
    engine = Engine(model, environment.features, run.engine_sizes)
    engine.sleep()
    drop_weights(model)
    rewards = run.rl.rewards if run.rl is not None else RewardSettings()
    return EngineActor(engine, environment, judge or rules_of(rewards), sync, judge)
