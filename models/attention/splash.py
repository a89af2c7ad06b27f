"""Attention on TPU: the Splash kernel of `jax.experimental.pallas`.

The compiler cannot shard the kernel: over several devices it runs inside `spread`. Away from a TPU
the kernel is interpreted, for tests.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib
from jaxtyping import Array, Float

from models.attention.target import SAVED, RowLayout, pad_rows

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
    layout: RowLayout,
    interpret: bool,
) -> Float[Array, "b t n h"]:
    """Compute `attention.attend` on this kernel, which has no packed rows."""
    b, t, n, h = q.shape
    segments = jnp.ones((b, t), jnp.int32) if layout.segments is None else layout.segments
    tile = _tile(t)
    padding = [(0, 0), (0, -t % tile)]
    ids = jnp.pad(segments, padding, constant_values=PADDING)
    shape = (ids.shape[1], ids.shape[1])
    one = mask_lib.CausalMask(shape) if layout.causal else mask_lib.FullMask(shape)
    mask = mask_lib.MultiHeadMask([one] * n)
    tiles = splash.BlockSizes(
        block_q=tile,
        block_q_dkv=tile,
        block_q_dq=tile,
        block_kv=tile,
        block_kv_dkv=tile,
        block_kv_dq=tile,
    )
    kernel = splash.make_splash_mha_single_device(
        mask, block_sizes=tiles, residual_checkpoint_name=SAVED, interpret=interpret
    )
    # The kernel wants heads before positions, and takes one sequence at a time.
    heads = (pad_rows(x, tile).swapaxes(1, 2) for x in (q * h**-0.5, k, v))
    out: Any = jax.vmap(kernel)(*heads, splash.SegmentIds(q=ids, kv=ids))
    return out.swapaxes(1, 2)[:, :t]


def _tile(length: int) -> int:
    """Return the tile that cuts `length` into the fewest parts, with the least padding."""
    tiles = _ceil_div(length, BLOCK)
    return _ceil_div(length, tiles * LANES) * LANES


def _ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b
