"""The vision tower of Qwen3-VL: a learned position table, and DeepStack."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.layers import LayerNorm, Linear, normal
from models.qwen3_vl.config import Qwen3VLVisionConfig
from models.vision import PatchLayout, PatchMerger, VisionBlock, VisionTower


class GELUVisionBlock(VisionBlock):
    """A block with a GELU between two products."""

    def mlp(self, x: Float[Array, "b p d"]) -> Float[Array, "b p d"]:
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


class Qwen3VLVisionTower(VisionTower):
    """Patch embeddings with positions, pre-norm blocks, and a merger for each level."""

    config: Qwen3VLVisionConfig

    def __init__(
        self,
        config: Qwen3VLVisionConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ):
        self.config = config
        self.dtype = dtype
        options: Any = {"rngs": rngs, "param_dtype": param_dtype}
        shape = (config.patch_dim, config.hidden_size)
        self.patch = Linear(shape, ("patch", "tower_embed"), stack=(), **options)
        table = (config.num_position_embeddings, config.hidden_size)
        self.positions = normal(rngs, table, ("position", "tower_embed"), 0.02, param_dtype)
        self.blocks = GELUVisionBlock(config, norm=LayerNorm, **options)
        options["norm"] = LayerNorm
        self.merger = PatchMerger(config, stack=(), norm_after=False, **options)
        mergers = PatchMerger(config, stack=(config.levels,), norm_after=True, **options)
        self.deepstack = mergers if config.levels else None

    def embed(self, patches: Float[Array, "b p c"], layout: PatchLayout) -> Float[Array, "b p d"]:
        return self.patch(patches) + self.position_embeddings(layout).astype(self.dtype)

    def position_embeddings(self, layout: PatchLayout) -> Float[Array, "b p d"]:
        """Return position embeddings: the square table, stretched over each frame.

        The interpolation is bilinear with aligned corners.
        """
        side = math.isqrt(self.config.num_position_embeddings)
        table = self.positions[...].astype(jnp.float32)
        corners = [
            (y_weight * x_weight)[..., None] * jnp.take(table, y * side + x, axis=0)
            for y, y_weight in _neighbours(layout.y, layout.height, side)
            for x, x_weight in _neighbours(layout.x, layout.width, side)
        ]
        return functools.reduce(operator.add, corners)


def _neighbours(
    index: Int[Array, "b p"], length: Int[Array, "b 1"], side: int
) -> list[tuple[Int[Array, "b p"], Float[Array, "b p"]]]:
    """Return the two of `side` table cells around each index of a frame's axis, and their
    weights."""
    # Aligned corners: index 0 is cell 0, and index length - 1 is cell side - 1.
    cell = index * jnp.float32(side - 1) / jnp.maximum(length - 1, 1)
    low = jnp.floor(cell).astype(jnp.int32)
    fraction = cell - low
    return [(low, 1.0 - fraction), (jnp.minimum(low + 1, side - 1), fraction)]
