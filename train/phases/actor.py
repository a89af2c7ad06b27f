"""What reads frames and plays episodes, opened once the vision tower is frozen."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from models.features import FrameFeatures
from models.qwen3_vl.model import Qwen3VL
from paravt_jax.data import video
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.method.protocol import Protocol
from paravt_jax.remote.judge import RemoteJudge
from rollout.agent.episode import Environment
from rollout.engine.engine import Engine
from train.data import Data
from train.learn.weight_sync import WeightSync
from train.phases.model import drop_weights
from train.settings import Run


@dataclasses.dataclass(frozen=True)
class Actor:
    """What plays episodes: the engine, how weights reach it, what agents see, and who judges."""

    engine: Engine
    sync: WeightSync
    environment: Environment
    judge: RemoteJudge | None

    def wake(self, weights: Any, version: int) -> None:
        """Brings `weights` to the engine under the number `version`."""
        # What it has goes first: new weights beside old ones may be too much.
        self.engine.sleep()
        self.engine.load(jax.block_until_ready(self.sync(weights)), version)


def open_environment(
    run: Run, data: Data, model: Qwen3VL, reader: FrameReader | None
) -> Environment:
    """The protocol and the frames' features; `reader` reads the frames of published videos."""
    features = FrameFeatures(
        model.vision, model.config, run.frames, data.root, source=reader or video
    )
    return Environment(Protocol(data.vocabulary, run.protocol), features)


def open_actor(
    run: Run, model: Qwen3VL, environment: Environment, judge: RemoteJudge | None, weights: Any
) -> Actor | None:
    """An actor that sleeps until `wake`; None for a run that plays no episodes. `weights` show
    where the trained ones lie."""
    if not run.plays_episodes:
        return None
    sync = WeightSync(weights, model.text.dtype)
    nnx.update(model.text, sync(weights))
    engine = Engine(model, environment.features, run.engine_sizes)
    engine.sleep()
    drop_weights(model)
    return Actor(engine, sync, environment, judge)
