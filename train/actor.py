"""Builds the parts of a run that encode frames and play episodes."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Iterable
from typing import Any

from flax import nnx

from models.compilation import compile_ahead
from models.features import FrameFeatures
from models.sharding import Lowering
from paravt_jax.data.frame_reader import FrameReader
from paravt_jax.method.accuracy import Rules
from paravt_jax.method.protocol import Protocol
from paravt_jax.processes import hosts
from paravt_jax.remote.judge import RemoteJudge
from rollout.agent.episode import Environment
from rollout.engine.engine import Engine
from train.data import Data
from train.learn.rl import Learner
from train.learn.update import TrainState
from train.learn.weight_sync import TrainedActor, TrainedSampler, WeightSync
from train.model import Parts, drop_weights
from train.settings import Run


@typing.runtime_checkable
class RunSampler(TrainedSampler, typing.Protocol):
    """What a run needs of a sampler: the engine, or another one."""

    version: int
    """Number of steps after which the weights are those that it samples under."""

    def forget(self) -> None:
        """Empty the cache: later requests reuse nothing that was computed before."""
        ...

    def lowerings(self) -> Iterable[Lowering]:
        """Return the programs that take long to compile, for `compile_ahead`."""
        ...

    def warm_up(self) -> None:
        """Compile every program, so that no later step does."""
        ...


@dataclasses.dataclass(frozen=True)
class EngineActor(TrainedActor):
    """An actor of a run, whose sampler is compiled before the first step."""

    sampler: RunSampler

    def compile(self, further: Iterable[Lowering] = ()) -> None:
        """Compile `further` programs, and those of the sampler and of the vision tower."""
        features = self.environment.features
        own = itertools.chain(self.sampler.lowerings(), features.lowerings())
        compile_ahead(itertools.chain(further, own), shown=hosts.is_first())

    def begin(self, learner: Learner, state: TrainState, step: int) -> None:
        """Compile everything, and load the weights of `state`; see `Actor.begin`."""
        features = self.environment.features
        self.compile(learner.lowerings(state, features))
        # Before the engine takes its memory.
        learner.warm_up(state.weights, features)
        super().begin(learner, state, step)
        self.sampler.warm_up()


def open_environment(run: Run, data: Data, parts: Parts, reader: FrameReader) -> Environment:
    """Build the protocol and the encoder of frames.

    Args:
        run: The settings.
        data: Gives the vocabulary, and the directory and the sizes of videos.
        parts: The model, whose vision tower is on this process's devices.
        reader: Reads the videos.
    """
    features = FrameFeatures(
        parts.model.vision,
        parts.model.config,
        run.frames,
        data.root,
        source=reader,
        trained=parts.skeleton.vision,
    )
    features.expect(data.sizes)
    return Environment(Protocol(data.vocabulary, run.protocol), features)


def open_actor(
    run: Run,
    parts: Parts,
    environment: Environment,
    weights: Any,
    judge: RemoteJudge | None = None,
) -> EngineActor:
    """Open an actor that sleeps until `load`.

    Args:
        run: The settings.
        parts: The model without its trained weights.
        environment: The protocol, and the frames' features.
        weights: The weights that are trained, on the mesh of training.
        judge: Scores open-ended answers; None: rules score them.
    """
    model = parts.model
    sync = WeightSync(weights, model.text.dtype, parts.skeleton.frozen)
    # The engine takes its first weights from the model, and keeps the frozen ones.
    nnx.update(model.text, sync(weights), sync.base)
    engine = Engine(model, environment.features, run.engine_sizes)
    engine.sleep()
    drop_weights(model)
    return EngineActor(engine, environment, judge or Rules(), sync)
