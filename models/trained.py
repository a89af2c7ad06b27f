"""Which weights of a model are trained, and the tree that holds them.

The trained weights are one nnx state: those of the text decoder, with its own names, and, if a part
of the vision tower is trained, that part under `vision`. Optimizer, checkpoints, weight sync,
export and plans follow it. The trained part of the tower stands between what is cached of frames
and visual vectors:

    trained   cached per visual token                    the trained part
    none      its visual vectors                         (nothing)
    merger    the states before the mergers              the mergers, DeepStack's included
    tower     its patches: nothing that is computed      the whole tower

What is cached never depends on trained weights, so it is read from batch to batch. Visual vectors
are computed from it under the current weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from models import lora
from models.config import VisionConfig
from models.lora import NOTHING
from models.model import VisionLanguageModel
from models.sharding import ROWS, current_mesh, on_devices
from models.text import TextDecoder
from models.vision import Mergers, VisionTower, cast_variable, encoding_weights

VISION = "vision"

TrainVision = Literal["none", "merger", "tower"]
"""Which part of the vision tower is trained."""

CHUNK_TOKENS = 1024
"""Visual tokens whose activations exist at a time; the next ones are computed after them."""


class Skeleton(NamedTuple):
    """What a model has besides its trained weights."""

    graph: nnx.GraphDef
    """The decoder's structure."""
    frozen: Any = NOTHING
    """The decoder's weights that are not trained; empty if all are."""
    vision: TrainedVision | None = None
    """The trained part of the vision tower, without its weights; None: none is trained."""

    def decoder(self, weights: Any, frozen: Any = None) -> TextDecoder:
        """Return the decoder with these trained weights.

        Args:
            weights: The decoder's trained weights, without those of the tower.
            frozen: Stands for `self.frozen` where a program takes it as an argument.
        """
        return nnx.merge(self.graph, weights, self.frozen if frozen is None else frozen)


def split(model: VisionLanguageModel, train_vision: TrainVision = "none") -> tuple[Any, Any, Any]:
    """Split a model into the decoder's structure, the trained weights and the decoder's other ones.

    This is the only place that decides what is trained: of the decoder, adapters if there are any
    and otherwise all weights (`models.lora.split`); and what `train_vision` names.
    """
    graph, text, rest = lora.split(model.text)
    return graph, merge_vision(text, trained_state(model.vision, train_vision)), rest


def split_vision(weights: Any) -> tuple[Any, Any]:
    """Return the trained weights of the decoder, and those of the tower; None if it has none."""
    if VISION not in weights:
        return weights, None
    text = {name: x for name, x in weights.raw_mapping.items() if name != VISION}
    return nnx.State(text), weights[VISION]


def merge_vision(text: Any, vision: Any) -> Any:
    """Return trained weights of the decoder and of the tower as one tree; see `split_vision`."""
    return text if vision is None else nnx.merge_state(text, {VISION: vision})


def in_activations(weights: Any, dtype: DTypeLike) -> Any:
    """Return trained weights as a model that computes in `dtype` needs them to sample."""
    text, vision = split_vision(weights)
    text = jax.tree.map(lambda x: x.astype(dtype), text)
    return merge_vision(text, None if vision is None else encoding_weights(vision, dtype))


# --- the trained part of the vision tower ---


@dataclasses.dataclass(frozen=True)
class TrainedVision:
    """The trained part of a vision tower, without its weights."""

    graph: nnx.GraphDef
    config: VisionConfig
    frame_tokens: int
    """Visual tokens of the largest frame."""
    whole: bool
    """Whether it is the whole tower. It then reads frames, padded to the size of the largest."""

    @staticmethod
    def of(tower: VisionTower, part: TrainVision, frame_tokens: int) -> TrainedVision | None:
        """Return the trained part of `tower`; None if it has none."""
        if part == "none":
            return None
        graph = nnx.graphdef(part_of(tower, part))
        return TrainedVision(graph, tower.config, frame_tokens, part == "tower")

    def trains(self, name: str) -> bool:
        """Return whether a module of the tower, by its name, is trained."""
        return self.whole or name in ("merger", "deepstack")

    @property
    def vector(self) -> tuple[int, int]:
        """The shape of what is cached per visual token."""
        return cached_shape(self.config, "tower" if self.whole else "merger")

    def padded(
        self, cached: Shaped[np.ndarray, "n 1 w"], grids: Sequence[tuple[int, int]]
    ) -> Shaped[np.ndarray, "m 1 w"]:
        """Return the patches of frames, one after another, with every frame padded to
        `frame_tokens`.

        Args:
            cached: Patches of all tokens.
            grids: Height and width of the frames, in patches.
        """
        tokens = [h * w // self.config.spatial_merge_size**2 for h, w in grids]
        padded = np.zeros((len(grids), self.frame_tokens, *cached.shape[1:]), cached.dtype)
        for target, frame in zip(padded, np.split(cached, np.cumsum(tokens))[:-1], strict=True):
            target[: len(frame)] = frame
        return padded.reshape(-1, *cached.shape[1:])

    def encode(
        self,
        weights: Any,
        cached: Float[Array, "b n c w"],
        grids: Int[Array, "b f 2"] | None,
        groups: int,
        room: int,
    ) -> Float[Array, "g m levels d"]:
        """Return the visual vectors of what is cached, in pieces that are computed again for
        gradients.

        With a mesh, rows are split over its devices, each of which has all weights.

        Args:
            weights: The trained weights of the tower.
            cached: What is cached of b rows of visual tokens; 0 for padding. If the whole tower is
                trained, a row has f frames of `frame_tokens` tokens each, padded on the right.
            grids: Height and width of these frames, in patches; 0 for a frame that does not exist.
            groups: Consecutive rows belong together; their vectors follow each other without gaps.
            room: The number m of vectors of a group.
        """
        encode: Callable[..., Array] = self._frames if self.whole else self._tokens
        if current_mesh() is not None:
            # The compiler cannot shard attention kernels. Here each device runs its own.
            rows = PartitionSpec(ROWS)
            encode = on_devices(encode, (PartitionSpec(), rows, rows), rows)
        vectors = encode(weights, cached, grids)
        if grids is None:
            return vectors.reshape(groups, room, *vectors.shape[2:])
        tokens = grids.prod(-1) // self.config.spatial_merge_size**2
        by_frame = vectors.reshape(groups, -1, self.frame_tokens, *vectors.shape[2:])
        return jax.vmap(_without_gaps, (0, 0, None))(by_frame, tokens.reshape(groups, -1), room)

    def _tokens(self, weights: Any, cached: Float[Array, "b n c w"], _: None) -> Array:
        """Merge the states of every token."""

        def merged(weights: Any, states: Float[Array, "n c w"]) -> Float[Array, "n c d"]:
            return nnx.merge(self.graph, weights).of_tokens(states[None])[0]

        rows = cached.shape[:2]
        vectors = _in_chunks(merged, CHUNK_TOKENS, weights, cached.reshape(-1, *cached.shape[2:]))
        return vectors.reshape(*rows, *vectors.shape[1:])

    def _frames(
        self, weights: Any, cached: Float[Array, "b n 1 w"], grids: Int[Array, "b f 2"]
    ) -> Array:
        """Run the tower on every frame, which only sees itself."""
        c = self.config

        def encoded(
            weights: Any, patches: Float[Array, "f p w"], grids: Int[Array, "f 2"]
        ) -> Float[Array, "f n c d"]:
            return nnx.merge(self.graph, weights)(patches, grids, remat=True)

        b, n = cached.shape[:2]
        patches = cached.reshape(-1, self.frame_tokens * c.spatial_merge_size**2, c.patch_dim)
        size = max(1, CHUNK_TOKENS // self.frame_tokens)
        vectors = _in_chunks(encoded, size, weights, patches, grids.reshape(-1, 2))
        return vectors.reshape(b, n, *vectors.shape[2:])


def cached_shape(config: VisionConfig, part: TrainVision) -> tuple[int, int]:
    """Return the shape of what is cached per visual token; see the module's docstring."""
    joined = config.spatial_merge_size**2
    return {
        "none": (1 + config.levels, config.out_hidden_size),
        "merger": (1 + config.levels, joined * config.hidden_size),
        "tower": (1, joined * config.patch_dim),
    }[part]


def trained_state(tower: VisionTower, part: TrainVision) -> nnx.State | None:
    """Return the weights of a real or abstract tower that are trained, in float32; None for
    none."""
    if part == "none":
        return None
    state = nnx.state(part_of(tower, part))
    return nnx.map_state(lambda _, variable: cast_variable(variable, jnp.float32), state)


def part_of(tower: VisionTower, part: Literal["merger", "tower"]) -> Mergers | VisionTower:
    """Return a part of the tower. Its weights have the names that they have in the tower."""
    return tower if part == "tower" else tower.mergers


def _without_gaps(
    vectors: Float[Array, "f n c d"], tokens: Int[Array, " f"], room: int
) -> Float[Array, "m c d"]:
    """Return the first `tokens` vectors of each frame, one after another, and then 0."""
    ends = jnp.cumsum(tokens)
    index = jnp.arange(room)
    frame = jnp.minimum(jnp.searchsorted(ends, index, side="right"), len(tokens) - 1)
    number = frame * vectors.shape[1] + index - (ends - tokens)[frame]
    flat = vectors.reshape(-1, *vectors.shape[2:])
    gathered = flat[jnp.clip(number, 0, len(flat) - 1)]
    return jnp.where((index < ends[-1])[:, None, None], gathered, 0)


def _in_chunks(function: Callable[..., Array], size: int, weights: Any, *arrays: Array) -> Array:
    """Apply `function` to one chunk of `size` rows after another; chunks of zeros give zeros."""
    count = len(arrays[0])
    size = min(size, count)
    chunks = math.ceil(count / size)

    def split(x: Array) -> Array:
        padding = [(0, chunks * size - count)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(chunks, size, *x.shape[1:])

    shape = jax.eval_shape(function, weights, *(x[:size] for x in arrays))

    @jax.checkpoint
    def run(chunk: tuple[Array, ...]) -> Array:
        # Most steps fill only a part of their room. No patch and no state of a real frame is all 0.
        return jax.lax.cond(
            jnp.any(chunk[0] != 0),
            lambda: function(weights, *chunk),
            lambda: jnp.zeros(shape.shape, shape.dtype),
        )

    results = jax.lax.map(run, tuple(map(split, arrays)))
    return results.reshape(chunks * size, *shape.shape[1:])[:count]
