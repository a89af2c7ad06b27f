"""The vision tower: patches of equal frames in, merged visual vectors and their DeepStack levels out.

Owns patch embedding, the interpolated position table, the blocks and the mergers. Attention stays within an image. Refuses grids
that do not match the patches or the merge. Invariant: an image's features depend on that image alone, so they may be cached.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from models.qwen3_vl.attention import attend
from models.qwen3_vl.config import VisionConfig
from models.qwen3_vl.layers import LayerNorm, Linear, normal
from models.qwen3_vl.rope import merge_order, rotate, vision_angles


class VisionBlock(nnx.Module):
    """Pre-norm attention and MLP; made with a leading layer axis, called with one layer's slice."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike):
        d, f, stack = config.hidden_size, config.intermediate_size, (config.depth,)
        self.heads = config.num_heads
        self.norm1 = LayerNorm(d, stack=stack, param_dtype=param_dtype)
        self.norm2 = LayerNorm(d, stack=stack, param_dtype=param_dtype)
        self.qkv = Linear((d, 3 * d), ("embed", "heads"), stack=stack, rngs=rngs, param_dtype=param_dtype)
        self.out = Linear((d, d), ("heads", "embed"), stack=stack, rngs=rngs, param_dtype=param_dtype)
        self.up = Linear((d, f), ("embed", "mlp"), stack=stack, rngs=rngs, param_dtype=param_dtype)
        self.down = Linear((f, d), ("mlp", "embed"), stack=stack, rngs=rngs, param_dtype=param_dtype)

    def __call__(self, x: Float[Array, "m p d"], angles: Float[Array, "1 p j"]) -> Float[Array, "m p d"]:
        m, p, d = x.shape
        q, k, v = jnp.moveaxis(self.qkv(self.norm1(x)).reshape(m, p, 3, self.heads, d // self.heads), 2, 0)
        x = x + self.out(attend(rotate(q, angles), rotate(k, angles), v, causal=False).reshape(m, p, d))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x)), approximate=True))


class PatchMerger(nnx.Module):
    """Joins merge x merge patches into one vector of the text width. DeepStack mergers (`stack` of them) norm after joining."""

    def __init__(self, config: VisionConfig, *, stack: tuple[int, ...], norm_after: bool, rngs: nnx.Rngs, param_dtype: DTypeLike):
        self.joined = config.hidden_size * config.spatial_merge_size**2
        self.norm_after = norm_after
        self.norm = LayerNorm(self.joined if norm_after else config.hidden_size, stack=stack, param_dtype=param_dtype)
        self.fc1 = Linear((self.joined, self.joined), ("embed", "mlp"), stack=stack, rngs=rngs, param_dtype=param_dtype)
        self.fc2 = Linear((self.joined, config.out_hidden_size), ("mlp", "embed"), stack=stack, rngs=rngs, param_dtype=param_dtype)

    def __call__(self, x: Float[Array, "m p d"]) -> Float[Array, "m q o"]:
        joined = (x.shape[0], -1, self.joined)
        x = self.norm(x.reshape(joined)) if self.norm_after else self.norm(x).reshape(joined)
        return self.fc2(jax.nn.gelu(self.fc1(x), approximate=False))


class VisionTower(nnx.Module):
    """The whole tower (REFERENCE: frozen in the published recipe)."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32, param_dtype: DTypeLike = jnp.float32):
        self.config = config
        self.dtype = dtype
        self.patch = Linear((config.patch_dim, config.hidden_size), ("patch", "embed"), stack=(), rngs=rngs, param_dtype=param_dtype)
        self.positions = normal(rngs, (config.num_position_embeddings, config.hidden_size), ("position", "embed"), 0.02, param_dtype)
        self.blocks = VisionBlock(config, rngs=rngs, param_dtype=param_dtype)
        self.merger = PatchMerger(config, stack=(), norm_after=False, rngs=rngs, param_dtype=param_dtype)
        self.deepstack = PatchMerger(config, stack=(config.levels,), norm_after=True, rngs=rngs, param_dtype=param_dtype)

    def __call__(self, patches: Float[Array, "m p c"], grid: tuple[int, int]) -> Float[Array, "m q levels d"]:
        """Features of m images of one static grid (height, width) in patches, p = height * width, q = p / merge^2 visual tokens.

        Index 0 of the third axis holds the merged features, 1 + i the DeepStack level i (levels = 1 + number of taps). Patches as
        `models.processor.patchify` makes them. ValueError where grid and patches disagree.
        """
        c = self.config
        if grid[0] * grid[1] != patches.shape[1] or grid[0] % c.spatial_merge_size or grid[1] % c.spatial_merge_size:
            raise ValueError(
                f"grid = {grid}: height x width is the number of patches ({patches.shape[1]}) and both are multiples of "
                f"{c.spatial_merge_size}; resize frames with models.processor.smart_resize first"
            )
        x = self.patch(patches.astype(self.dtype)) + self._positions(grid).astype(self.dtype)
        x, taps = self._run_blocks(x, jnp.asarray(vision_angles(grid, c))[None])
        features = [self.merger(x)[None]]
        if c.levels:
            graph, state = nnx.split(self.deepstack)
            features.append(jax.vmap(lambda s, tap: nnx.merge(graph, s)(tap))(state, taps))
        return jnp.moveaxis(jnp.concatenate(features), 0, 2)

    def _run_blocks(
        self, x: Float[Array, "m p d"], angles: Float[Array, "1 p j"]
    ) -> tuple[Float[Array, "m p d"], Float[Array, "levels m p d"]]:
        """The hidden states after the last block, and after each tapped one."""
        c = self.config
        # Untapped layers write to one spare slot: the scan then keeps levels + 1 hidden states, not one a layer.
        slots = np.full(c.depth, c.levels)
        slots[list(c.deepstack_visual_indexes)] = np.arange(c.levels)
        graph, state = nnx.split(self.blocks)

        def body(carry, layer):
            x, taps = carry
            params, slot = layer
            x = nnx.merge(graph, params)(x, angles)
            return (x, jax.lax.dynamic_update_index_in_dim(taps, x, slot, 0)), None

        taps = jnp.zeros((c.levels + 1, *x.shape), x.dtype)
        (x, taps), _ = jax.lax.scan(body, (x, taps), (state, jnp.asarray(slots)))
        return x, taps[: c.levels]

    def _positions(self, grid: tuple[int, int]) -> Float[Array, "p d"]:
        """The position table, interpolated to the grid (bilinear, corners aligned), in merge order."""
        side = int(self.config.num_position_embeddings**0.5)
        rows, columns = (_interpolation(n, side) for n in grid)
        table = self.positions[...].astype(jnp.float32).reshape(side, side, -1)
        cells = jnp.einsum("ya,xb,abd->yxd", rows, columns, table, precision=jax.lax.Precision.HIGHEST)
        return merge_order(cells, self.config.spatial_merge_size)


def _interpolation(n: int, side: int) -> Float[np.ndarray, "n side"]:
    """Weights that stretch a line of `side` cells over n points, both ends on the outer cells."""
    source = np.arange(n, dtype=np.float32) * np.float32(side - 1) / np.float32(max(n - 1, 1))
    return np.maximum(0.0, 1.0 - np.abs(source[:, None] - np.arange(side, dtype=np.float32))).astype(np.float32)
