"""The vision tower of Qwen2.5-VL: most layers see windows of a frame, some see whole frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.layers import Linear, RMSNorm
from models.qwen2_5_vl.config import Qwen25VLVisionConfig
from models.vision import PatchLayout, PatchMerger, VisionBlock, VisionTower

# More windows than a frame has along a side.
_MOST_WINDOWS = 512


class GatedVisionBlock(VisionBlock):
    """A block with RMS norms and a gated MLP."""

    def __init__(self, config: Qwen25VLVisionConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike):
        super().__init__(config, norm=RMSNorm, rngs=rngs, param_dtype=param_dtype)
        shape, axes = (config.hidden_size, config.intermediate_size), ("tower_embed", "tower_mlp")
        self.gate = Linear(shape, axes, stack=(config.depth,), rngs=rngs, param_dtype=param_dtype)

    def mlp(self, x: Float[Array, "b p d"]) -> Float[Array, "b p d"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Qwen25VLVisionTower(VisionTower):
    """Patch embeddings, blocks with windows, and a merger."""

    config: Qwen25VLVisionConfig

    def __init__(
        self,
        config: Qwen25VLVisionConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ):
        self.config = config
        self.dtype = dtype
        options: Any = {"rngs": rngs, "param_dtype": param_dtype}
        shape = (config.patch_dim, config.hidden_size)
        self.patch = Linear(shape, ("patch", "tower_embed"), stack=(), bias=False, **options)
        self.blocks = GatedVisionBlock(config, **options)
        self.merger = PatchMerger(config, stack=(), norm=RMSNorm, norm_after=False, **options)
        self.deepstack = None

    def embed(self, patches: Float[Array, "b p c"], layout: PatchLayout) -> Float[Array, "b p d"]:
        return self.patch(patches)

    def segments(self, layout: PatchLayout) -> Callable[[Int[Array, ""]], Int[Array, "b p"]]:
        """Return frames for some layers, and windows, counted from a frame's upper left, for the
        others.

        Windows are segments, not an order of patches: a row has few patches, so the masked part of
        attention is cheap next to the projections.
        """
        side = self.config.window_patches
        window = layout.y // side * _MOST_WINDOWS + layout.x // side
        windows = layout.real * (1 + window)
        full = np.isin(np.arange(self.config.depth), self.config.fullatt_block_indexes)
        return lambda number: jnp.where(jnp.asarray(full)[number], layout.real, windows)
