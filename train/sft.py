"""The cold start: supervised steps on demonstrations of main agents and sub-agents.

Owns the loss and the settings of SFT. A step takes groups of demonstrations that share their overview (computed once) and
windows of sub-agents, and averages over the tokens that each would have written. Which demonstrations, in which order,
is the loader's; when to save, the run's. Published demonstrations are `train.packed_sft`'s.
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
from models.sharding import row_devices
from paravt_jax.grpo import masked_mean
from paravt_jax.loader import stream
from paravt_jax.protocol import Protocol
from paravt_jax.records import Demonstration, Trajectory
from paravt_jax.video import VideoError
from train import hosts
from train.batch import BatchShape, Sequences, build
from train.optimizer import OptimizerSettings, make_optimizer, require_counts
from train.placement import cut, fit, own, parts_on, place
from train.step import Loss, Program, TrainState, init_state, make_update, mesh_of, row_logprobs


@dataclasses.dataclass(frozen=True)
class SFTSettings:
    """Updates, the shapes of a step's two batches (main agents, sub-agents), and how often to save."""

    steps: int
    main: BatchShape
    windows: BatchShape
    optimizer: OptimizerSettings
    save_every: int = 100
    microbatches: int = 1
    """Most parts in which an update is computed, each of whole groups (missing ones are padding); the loss is the same. There are fewer
    where parts of so few rows would be padded, every device computes at least one; more where only that gives each process whole groups."""
    remat: Remat = "none"
    """What the backward pass finds saved of each layer: everything, its input (full), that and what attention gave (attention), both and
    the matrix products (dots), or its input in the host's memory (offload)."""
    logprob_chunk: int | None = None

    def __post_init__(self):
        require_counts("sft", steps=self.steps, save_every=self.save_every, microbatches=self.microbatches)
        remat.check("sft.remat", self.remat)
        for name, shape in (("main", self.main), ("windows", self.windows)):
            if shape.groups < self.microbatches:
                raise ValueError(f"sft.microbatches: {self.microbatches} parts of sft.{name}.groups = {shape.groups}; give at most so many")


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
    return SFTBatch(tuple(cut(s, parts) for s in batch.sequences), jnp.broadcast_to(batch.tokens, (parts, *batch.tokens.shape)))


def sft_loss(image_token_id: int, settings: SFTSettings) -> Loss:
    """Mean negative log-likelihood of the sampled tokens of each of the batches, averaged over these: a sub-agent's few words weigh as
    much as a main agent's many. Also the number of tokens and of groups."""

    def loss(text: TextDecoder, batch: SFTBatch) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        total, tokens = jnp.zeros(()), jnp.zeros(())
        for sequences, whole in zip(batch.sequences, batch.tokens, strict=True):
            logprobs = row_logprobs(text, sequences, image_token_id, 1.0, settings.remat, settings.logprob_chunk)
            total -= masked_mean(logprobs, jnp.asarray(sequences.sampled), whole) / len(batch.sequences)
            tokens += sequences.sampled.sum()
        groups = sum((s.prompt_segments.any(1).sum() for s in batch.sequences), jnp.zeros((), jnp.int32))
        return total, {"tokens": tokens, "groups": groups}

    return loss


def start_sft(graph: nnx.GraphDef, weights: Any, image_token_id: int, settings: SFTSettings) -> tuple[TrainState, Program]:
    """The state before the first step, and the jitted update `f(state, SFTBatch) -> (state, metrics)`."""
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    state = init_state(weights, optimizer)
    return state, make_sft_update(graph, optimizer, image_token_id, settings, state)


def make_sft_update(
    graph: nnx.GraphDef, optimizer: optax.GradientTransformation, image_token_id: int, settings: SFTSettings, state: TrainState
) -> Program:
    """The update of the cold start, `f(state, SFTBatch) -> (state, metrics)`."""
    parts = parts_on(mesh_of(state.weights), (settings.main, settings.windows), settings.microbatches)
    cut = (lambda batch: split(batch, parts)) if parts > 1 else None
    return make_update(graph, optimizer, sft_loss(image_token_id, settings), state, cut)


def fitted_shapes(settings: SFTSettings, mesh: Mesh) -> list[BatchShape]:
    """The shapes of main agents' and sub-agents' batches with the padding that the mesh wants."""
    shapes = settings.main, settings.windows
    parts = parts_on(mesh, shapes, settings.microbatches)
    return [fit(shape, row_devices(mesh), parts) for shape in shapes]


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
    mesh: Mesh,
) -> SFTBatch:
    """The arrays of one step on the mesh: groups of main agents' demonstrations, and sub-agents' one by one. Unreadable ones become
    padding. `groups` and `windows` are the whole step's; a process renders and lays out its share of them."""
    shapes = [own(shape) for shape in fitted_shapes(settings, mesh)]
    mine = groups[hosts.share_of(len(groups))], [(d,) for d in windows[hosts.share_of(len(windows))]]
    built = (build(_readable(rows, protocol, features), features, shape) for rows, shape in zip(mine, shapes, strict=True))
    return SFTBatch.of(*(place(sequences, mesh) for sequences in built))


class Course:
    """The steps of a cold start: endless batches of demonstrations, as an update takes them, in an order that goes on exactly."""

    def __init__(
        self,
        settings: SFTSettings,
        demonstrations: Sequence[Sequence[Demonstration]],
        windows: Sequence[Sequence[Demonstration]],
        seed: int,
        protocol: Protocol,
        features: FrameFeatures,
        mesh: Mesh,
    ):
        self._settings, self._image = settings, features.config.image_token_id
        self._main = stream(demonstrations, seed, settings.main.groups)
        self._windows = stream(windows, seed + 1, settings.windows.groups)
        self._lay_out = functools.partial(sft_batch, protocol=protocol, features=features, settings=settings, mesh=mesh)

    def start(self, graph: nnx.GraphDef, weights: Any) -> tuple[TrainState, Program]:
        """As `start_sft`."""
        return start_sft(graph, weights, self._image, self._settings)

    def __next__(self) -> tuple[SFTBatch, tuple[Sequences, ...], dict[str, float]]:
        """What the update takes, the arrays whose tokens count, and figures."""
        batch = self._lay_out(next(self._main), [d for (d,) in next(self._windows)])
        return batch, batch.sequences, {}

    def get_state(self) -> dict[str, Any]:
        return {"main": self._main.get_state(), "windows": self._windows.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._main.set_state(state["main"])
        self._windows.set_state(state["windows"])


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
