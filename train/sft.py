"""The cold start: supervised steps on demonstrations of main agents and sub-agents.

Owns the loss and the settings of SFT. A step takes groups of demonstrations that share their overview (computed once) and
windows of sub-agents, and averages over the tokens that each would have written. Which demonstrations, in which order,
is the loader's; when to save, the run's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.features import FrameFeatures
from models.qwen3_vl.text import TextDecoder
from paravt_jax.grpo import masked_mean
from paravt_jax.protocol import Protocol
from paravt_jax.records import Demonstration, Trajectory
from paravt_jax.video import VideoError
from train.batch import BatchShape, Sequences, build
from train.optimizer import OptimizerSettings, make_optimizer, require_counts
from train.step import Loss, TrainState, Update, init_state, make_update, row_logprobs


@dataclasses.dataclass(frozen=True)
class SFTSettings:
    """Updates, the shapes of a step's two batches (main agents, sub-agents), and how often to save."""

    steps: int
    main: BatchShape
    windows: BatchShape
    optimizer: OptimizerSettings
    save_every: int = 100
    remat: bool = False
    logprob_chunk: int | None = None

    def __post_init__(self):
        require_counts("sft", steps=self.steps, save_every=self.save_every)


def sft_loss(image_token_id: int, settings: SFTSettings) -> Loss:
    """Mean negative log-likelihood of the sampled tokens of each of the batches, averaged over these: a sub-agent's few words weigh as
    much as a main agent's many. Also the number of tokens and of groups."""

    def loss(text: TextDecoder, batches: tuple[Sequences, ...]) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        total, tokens = jnp.zeros(()), jnp.zeros(())
        for batch in batches:
            logprobs = row_logprobs(text, batch, image_token_id, 1.0, settings.remat, settings.logprob_chunk)
            total -= masked_mean(logprobs, jnp.asarray(batch.sampled)) / len(batches)
            tokens += batch.sampled.sum()
        groups = sum((batch.prompt_segments.any(1).sum() for batch in batches), jnp.zeros((), jnp.int32))
        return total, {"tokens": tokens, "groups": groups}

    return loss


def start_sft(graph: nnx.GraphDef, weights: Any, image_token_id: int, settings: SFTSettings) -> tuple[TrainState, Update]:
    """The state before the first step, and the jitted update `f(state, batches) -> (state, metrics)`."""
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    state = init_state(weights, optimizer)
    return state, make_update(graph, optimizer, sft_loss(image_token_id, settings), state)


def render(demonstration: Demonstration, protocol: Protocol, features: FrameFeatures) -> Trajectory:
    """A demonstration with the frames it speaks of, as the protocol writes it."""
    if demonstration.window is None:
        frames = features.overview(demonstration.video, demonstration.frames)
    else:
        settings = protocol.settings
        frames = features.window(demonstration.video, *demonstration.window, settings.crop_fps, settings.crop_frames)
    return protocol.demonstration(demonstration, frames, features.tokens(demonstration.video))


def sft_batch(
    groups: Sequence[Sequence[Demonstration]],
    windows: Sequence[Demonstration],
    protocol: Protocol,
    features: FrameFeatures,
    settings: SFTSettings,
) -> tuple[Sequences, Sequences]:
    """The arrays of one step: groups of main agents' demonstrations, and sub-agents' one by one. Unreadable ones become padding."""
    main, alone = _readable(groups, protocol, features), _readable([(d,) for d in windows], protocol, features)
    return build(main, features, settings.main), build(alone, features, settings.windows)


def _readable(groups: Sequence[Sequence[Demonstration]], protocol: Protocol, features: FrameFeatures) -> list[list[Trajectory]]:
    rendered = []
    for group in groups:
        try:
            trajectories = [render(demonstration, protocol, features) for demonstration in group]
            features(trajectories[0].frames)
        except VideoError:
            continue  # damage inside a file that opened; `groups` in the metrics falls short of the recipe's
        rendered.append(trajectories)
    return rendered
