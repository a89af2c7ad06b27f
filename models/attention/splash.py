"""Attention on TPU: the Splash kernel of `jax.experimental.pallas`.

A row and its prefix form one sequence of the kernel. The compiler cannot shard the kernel: over
several devices it runs inside `spread`. Away from a TPU the kernel is interpreted, for tests.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib
from jaxtyping import Array, Float

from models.attention.target import SAVED, RowLayout

# Tiles are a multiple of this, in positions.
LANES = 128
# Largest tile, in positions.
BLOCK = 512
# Segment of the positions that fill the last tile. No token has it, so no token sees them.
PADDING = -1


def supports(q: Float[Array | jax.ShapeDtypeStruct, "b t n h"]) -> bool:
    """Return whether the kernel can take these queries: bfloat16 or float32."""
    return q.dtype in (jnp.bfloat16, jnp.float32)


def attend(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    prefix: tuple[Float[Array, "b s k h"], Float[Array, "b s k h"]] | None,
    layout: RowLayout,
    interpret: bool,
) -> Float[Array, "b t n h"]:
    """Compute `attention.attend` on this kernel, which has no packed rows.

    The kernel's queries are the row, its keys the prefix and the row.
    """
    b, t, n, h = q.shape
    segments = jnp.ones((b, t), jnp.int32) if layout.segments is None else layout.segments
    # Without a prefix: one of length 0.
    prefix_k, prefix_v = (k[:, :0], v[:, :0]) if prefix is None else prefix
    s = prefix_k.shape[1]
    valid = jnp.ones((b, s), bool) if layout.prefix_mask is None else layout.prefix_mask
    tile_q = _tile(t)
    tile_k = _tile(s + t)

    def sequence(*pieces: Any, tile: int, fill: int = 0) -> Array:
        """Join pieces along positions, [b, sum of lengths, ...], and pad to whole tiles."""
        whole = jnp.concatenate(pieces, axis=1)
        padding = [(0, 0), (0, -whole.shape[1] % tile)] + [(0, 0)] * (whole.ndim - 2)
        return jnp.pad(whole, padding, constant_values=fill)

    # A valid prefix position gets segment 1, which is that of every valid token of the rows.
    ids = splash.SegmentIds(
        q=sequence(segments, tile=tile_q, fill=PADDING),
        kv=sequence(valid.astype(segments.dtype), segments, tile=tile_k, fill=PADDING),
    )
    shape = (ids.q.shape[1], ids.kv.shape[1])
    # The queries are the last of the keys.
    one = mask_lib.CausalMask(shape, offset=s) if layout.causal else mask_lib.FullMask(shape)
    mask = mask_lib.MultiHeadMask([one] * n)
    tiles = splash.BlockSizes(
        block_q=tile_q,
        block_q_dkv=tile_q,
        block_q_dq=tile_q,
        block_kv=tile_k,
        block_kv_dkv=tile_k,
        block_kv_dq=tile_k,
    )
    kernel = splash.make_splash_mha_single_device(
        mask, block_sizes=tiles, residual_checkpoint_name=SAVED, interpret=interpret
    )
    heads = [
        sequence(q * h**-0.5, tile=tile_q),
        sequence(prefix_k, k, tile=tile_k),
        sequence(prefix_v, v, tile=tile_k),
    ]
    # The kernel wants heads before positions, and takes one sequence at a time.
    out: Any = jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in heads), ids)
    return out.swapaxes(1, 2)[:, :t]


def _tile(length: int) -> int:
    """Return the tile that cuts `length` into the fewest parts, with the least padding."""
    tiles = _ceil_div(length, BLOCK)
    return _ceil_div(length, tiles * LANES) * LANES


def _ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b
