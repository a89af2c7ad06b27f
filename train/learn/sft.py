"""The cold start: supervised steps on demonstrations of main agents and sub-agents.

Owns the loss and the settings of SFT. A step takes groups of demonstrations that share their overview (computed once) and
windows of sub-agents, and averages over the tokens that each would have written. Which demonstrations, in which order,
is the loader's; when to save, the run's. Published demonstrations are `train.learn.packed_sft`'s.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx, struct
from jax.sharding import Mesh
from jaxtyping import Array, Float

from models.features import FrameFeatures
from models.qwen3_vl import remat
from models.qwen3_vl.remat import Remat
from models.qwen3_vl.text import TextDecoder
from paravt_jax.data.loader import stream
from paravt_jax.data.video import VideoError
from paravt_jax.method.grpo import masked_mean
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import Demonstration, Trajectory
from rollout.engine.settings import Lengths
from rollout.engine.sizing import round_up
from train.durable import hosts
from train.learn.batch import BatchShape, Sequences, build
from train.learn.optimizer import OptimizerSettings, make_optimizer, require_counts
from train.learn.placement import cut, fitted, own, place
from train.learn.step import Loss, Program, TrainState, init_state, make_update, row_logprobs
from train.world_lengths import WorldLengths


@dataclasses.dataclass(frozen=True)
class SFTSettings:
    """Supervised steps on demonstrations of the small world."""

    steps: int
    """Updates."""
    groups: int
    """Groups of main agents' demonstrations per step; a group shares its video and overview."""
    windows: int
    """Sub-agents' demonstrations per step."""
    optimizer: OptimizerSettings
    save_every: int = 100
    """Steps between checkpoints."""
    microbatches: int = 1
    """Upper bound on gradient-accumulation steps; fewer where they would only add padding."""
    remat: Remat = "none"
    """Activation checkpointing: what of each layer is kept for the backward pass (models.qwen3_vl.remat)."""
    logprob_chunk: int | None = None
    """Tokens whose logits over the vocabulary exist at a time; None: all of them."""

    def __post_init__(self):
        require_counts(
            "sft",
            steps=self.steps,
            groups=self.groups,
            windows=self.windows,
            save_every=self.save_every,
            microbatches=self.microbatches,
        )
        remat.check("sft.remat", self.remat)

    def shapes(
        self, longest: Lengths, texts: WorldLengths, rows: int
    ) -> tuple[BatchShape, BatchShape]:
        """Shapes of a step's batches, main agents' and sub-agents'. `longest`: lengths of the run's
        sequences; `texts`: those of the demonstrations; `rows`: demonstrations in a group."""
        main = BatchShape(
            self.groups, rows, longest.prompt, longest.visual, round_up(texts.row, 16)
        )
        windows = BatchShape(
            self.windows, 1, longest.crop_prompt, longest.crop_visual, texts.report + 1
        )
        return main, windows


@struct.dataclass
class SFTBatch:
    """What an update reads: the batches of main agents and of sub-agents, and how many tokens each of them trains on in the whole step."""

    sequences: tuple[Sequences, ...]
    tokens: Float[Array, " n"]

    @classmethod
    def of(cls, *sequences: Sequences) -> SFTBatch:
        return cls(sequences, jnp.stack([s.sampled.sum().astype(jnp.float32) for s in sequences]))


def split(batch: SFTBatch, parts: int) -> SFTBatch:
    """The batch in `parts` micro-batches of whole groups: every array gets them as its first axis."""
    return SFTBatch(
        tuple(cut(s, parts) for s in batch.sequences),
        jnp.broadcast_to(batch.tokens, (parts, *batch.tokens.shape)),
    )


def sft_loss(image_token_id: int, settings: SFTSettings) -> Loss:
    """Mean negative log-likelihood of the sampled tokens of each of the batches, averaged over these: a sub-agent's few words weigh as
    much as a main agent's many. Also the number of tokens and of groups."""

    def loss(
        text: TextDecoder, batch: SFTBatch
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        total, tokens = jnp.zeros(()), jnp.zeros(())
        for sequences, whole in zip(batch.sequences, batch.tokens, strict=True):
            logprobs = row_logprobs(
                text, sequences, image_token_id, 1.0, settings.remat, settings.logprob_chunk
            )
            total -= masked_mean(logprobs, jnp.asarray(sequences.sampled), whole) / len(
                batch.sequences
            )
            tokens += sequences.sampled.sum()
        groups = sum(
            (s.prompt_segments.any(1).sum() for s in batch.sequences), jnp.zeros((), jnp.int32)
        )
        return total, {"tokens": tokens, "groups": groups}

    return loss


def start_sft(
    graph: nnx.GraphDef, weights: Any, image_token_id: int, settings: SFTSettings, parts: int = 1
) -> tuple[TrainState, Program]:
    """The state before the first step, and the jitted update `f(state, SFTBatch) -> (state, metrics)`."""
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    state = init_state(weights, optimizer)
    return state, make_sft_update(graph, optimizer, image_token_id, settings, parts, state)


def make_sft_update(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    image_token_id: int,
    settings: SFTSettings,
    parts: int,
    state: TrainState,
) -> Program:
    """The update of the cold start in `parts` micro-batches, `f(state, SFTBatch) -> (state, metrics)`."""
    cut = (lambda batch: split(batch, parts)) if parts > 1 else None
    return make_update(graph, optimizer, sft_loss(image_token_id, settings), state, cut)


def render(demonstration: Demonstration, protocol: Protocol, features: FrameFeatures) -> Trajectory:
    """A demonstration with the frames it speaks of, as the protocol writes it."""
    if demonstration.window is None:
        frames = features.overview(demonstration.video, demonstration.frames)
    else:
        settings = protocol.settings
        frames = features.window(
            demonstration.video, *demonstration.window, settings.crop_fps, settings.crop_frames
        )
    return protocol.demonstration(demonstration, frames, features.tokens(demonstration.video))


def sft_batch(
    groups: Sequence[Sequence[Demonstration]],
    windows: Sequence[Demonstration],
    protocol: Protocol,
    features: FrameFeatures,
    shapes: Sequence[BatchShape],
    mesh: Mesh,
) -> SFTBatch:
    """The arrays of one step on the mesh: groups of main agents' demonstrations, and sub-agents' one by one. Unreadable ones become
    padding. `groups`, `windows` and `shapes` are the whole step's; a process renders and lays out its share of them."""
    mine = (
        groups[hosts.share_of(len(groups))],
        [(d,) for d in windows[hosts.share_of(len(windows))]],
    )
    built = (
        build(_readable(rows, protocol, features), features, own(shape))
        for rows, shape in zip(mine, shapes, strict=True)
    )
    return SFTBatch.of(*(place(sequences, mesh) for sequences in built))


class Course:
    """The steps of a cold start: endless batches of demonstrations, as an update takes them, in an order that goes on exactly."""

    def __init__(
        self,
        settings: SFTSettings,
        shapes: Sequence[BatchShape],
        demonstrations: Sequence[Sequence[Demonstration]],
        windows: Sequence[Sequence[Demonstration]],
        seed: int,
        protocol: Protocol,
        features: FrameFeatures,
        mesh: Mesh,
    ):
        self._settings, self._image = settings, features.config.image_token_id
        self._main = stream(demonstrations, seed, settings.groups)
        self._windows = stream(windows, seed + 1, settings.windows)
        padded, self._parts = fitted(shapes, settings.microbatches, mesh)
        self._lay_out = functools.partial(
            sft_batch, protocol=protocol, features=features, shapes=padded, mesh=mesh
        )

    def start(self, graph: nnx.GraphDef, weights: Any) -> tuple[TrainState, Program]:
        """As `start_sft`."""
        return start_sft(graph, weights, self._image, self._settings, self._parts)

    def __next__(self) -> tuple[SFTBatch, tuple[Sequences, ...], dict[str, float]]:
        """What the update takes, the arrays whose tokens count, and figures."""
        batch = self._lay_out(next(self._main), [d for (d,) in next(self._windows)])
        return batch, batch.sequences, {}

    def get_state(self) -> dict[str, Any]:
        return {"main": self._main.get_state(), "windows": self._windows.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._main.set_state(state["main"])
        self._windows.set_state(state["windows"])


def _readable(
    groups: Sequence[Sequence[Demonstration]], protocol: Protocol, features: FrameFeatures
) -> list[list[Trajectory]]:
    rendered = []
    for group in groups:
        try:
            trajectories = [render(demonstration, protocol, features) for demonstration in group]
            features(trajectories[0].frames)
        except VideoError:
            continue  # damage inside a file that opened; `groups` in the metrics falls short of the recipe's
        rendered.append(trajectories)
    return rendered
