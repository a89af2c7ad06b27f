"""The vision tower of Qwen3-VL: a learned position table, and DeepStack."""

from __future__ import annotations

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.attention import attend
from models.layers import LayerNorm, Linear, normal
from models.qwen3_vl.config import Qwen3VLVisionConfig
from models.rope import rotate
from models.vision import PatchLayout, PatchMerger, VisionTower


class VisionBlock(nnx.Module):
    """Pre-norm attention and MLP.

    The parameters hold all layers, stacked along a leading axis. A call takes one layer: the module
    merged with one slice of those parameters.
    """

    def __init__(self, config: Qwen3VLVisionConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike):
        d = config.hidden_size
        f = config.intermediate_size
        stack = (config.depth,)
        self.heads = config.num_heads
        self.norm1 = LayerNorm(d, stack=stack, param_dtype=param_dtype)
        self.norm2 = LayerNorm(d, stack=stack, param_dtype=param_dtype)
        self.qkv = Linear(
            (d, 3 * d), ("embed", "heads"), stack=stack, rngs=rngs, param_dtype=param_dtype
        )
        self.out = Linear(
            (d, d), ("heads", "embed"), stack=stack, rngs=rngs, param_dtype=param_dtype
        )
        self.up = Linear((d, f), ("embed", "mlp"), stack=stack, rngs=rngs, param_dtype=param_dtype)
        self.down = Linear(
            (f, d), ("mlp", "embed"), stack=stack, rngs=rngs, param_dtype=param_dtype
        )

    def __call__(
        self,
        x: Float[Array, "b p d"],
        angles: Float[Array, "#b p j"],
        frame: Int[Array, "b p"] | None,
    ) -> Float[Array, "b p d"]:
        b, p, d = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(b, p, 3, self.heads, d // self.heads)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        q = rotate(q, angles)
        k = rotate(k, angles)
        # Frames are segments, so a patch sees the patches of its own frame.
        attended = attend(q, k, v, causal=False, segment_ids=frame)
        x = x + self.out(attended.reshape(b, p, d))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x)), approximate=True))


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
        d = config.hidden_size
        self.patch = Linear(
            (config.patch_dim, d), ("patch", "embed"), stack=(), rngs=rngs, param_dtype=param_dtype
        )
        cells = config.num_position_embeddings
        self.positions = normal(rngs, (cells, d), ("position", "embed"), 0.02, param_dtype)
        self.blocks = VisionBlock(config, rngs=rngs, param_dtype=param_dtype)
        self.merger = PatchMerger(
            config,
            stack=(),
            norm=LayerNorm,
            norm_after=False,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        mergers = PatchMerger(
            config,
            stack=(config.levels,),
            norm=LayerNorm,
            norm_after=True,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.deepstack = mergers if config.levels else None

    def embed(self, patches: Float[Array, "b p c"], layout: PatchLayout) -> Float[Array, "b p d"]:
        return self.patch(patches) + self.position_embeddings(layout).astype(self.dtype)

    def position_embeddings(self, layout: PatchLayout) -> Float[Array, "b p d"]:
        """Position embeddings: the square table, stretched over each frame.

        The interpolation is bilinear with aligned corners.
        """
        side = math.isqrt(self.config.num_position_embeddings)
        table = self.positions[...].astype(jnp.float32)
        rows = _neighbours(layout.row, layout.height, side)
        columns = _neighbours(layout.column, layout.width, side)
        corners = [
            (row_weight * column_weight)[..., None] * jnp.take(table, row * side + column, axis=0)
            for row, row_weight in rows
            for column, column_weight in columns
        ]
        return functools.reduce(operator.add, corners)


def _neighbours(
    place: Int[Array | np.ndarray, "b p"], length: Int[Array | np.ndarray, "b p"], side: int
) -> list[tuple[Int[Array, "b p"], Float[Array, "b p"]]]:
    """The two of `side` table cells around each place of a frame's axis, and their weights."""
    # Aligned corners: place 0 is cell 0, and place length - 1 is cell side - 1.
    cell = place * jnp.float32(side - 1) / jnp.maximum(length - 1, 1)
    low = jnp.floor(cell).astype(jnp.int32)
    fraction = cell - low
    return [(low, 1.0 - fraction), (jnp.minimum(low + 1, side - 1), fraction)]
