"""Attention on TPU: the Splash kernel of `jax.experimental.pallas`.

The rows of a prompt and their shared prefix form one sequence of the kernel, so the prefix is never
repeated. The compiler cannot shard the kernel: over several devices it runs inside `spread`. Away
from a TPU the kernel is interpreted, for tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib
from jaxtyping import Array, Bool, Float, Int

from models.attention.target import SAVED, Masks

# Tiles are a multiple of this, in positions.
LANES = 128
# Largest tile, in positions.
BLOCK = 512
# Segment of the positions that fill the last tile. No token has it, so no token sees them.
PADDING = -1


def supports(q: Float[Array | jax.ShapeDtypeStruct, "b t n h"], packed: bool) -> bool:
    """Whether the kernel can take these queries: bfloat16 or float32, not in packed rows."""
    return q.dtype in (jnp.bfloat16, jnp.float32) and not packed


def attend(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    *,
    causal: bool,
    prefix: tuple[Float[Array, "p s k h"], Float[Array, "p s k h"]] | None,
    masks: Masks,
    interpret: bool,
) -> Float[Array, "b t n h"]:
    """`attention.attend` on this kernel, which has no packed rows."""
    segments = jnp.ones(q.shape[:2], jnp.int32) if masks.segments is None else masks.segments
    if prefix is None:
        # A prefix of length 0 for every row: each row is a group of its own.
        prefix = (k[:, :0], v[:, :0])
    valid = jnp.ones(prefix[0].shape[:2], bool) if masks.prefix is None else masks.prefix
    return _attend_groups(
        q * q.shape[-1] ** -0.5, k, v, segments, *prefix, valid, causal=causal, interpret=interpret
    )


def _attend_groups(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    segments: Int[Array, "b t"],
    prefix_k: Float[Array, "p s k h"],
    prefix_v: Float[Array, "p s k h"],
    valid: Bool[Array, "p s"],
    *,
    causal: bool,
    interpret: bool,
) -> Float[Array, "b t n h"]:
    """Each group as one sequence: queries [row 1, ..., row g], keys [prefix, row 1, ..., row g]."""
    b, t, n, h = q.shape
    p, s = valid.shape
    queries = b // p * t
    tile_q = _tile(queries)
    tile_k = _tile(s + queries)

    def sequence(*parts: Array, tile: int, fill: int = 0) -> Array:
        """Joins parts along positions, [p, sum of lengths, ...], and pads to whole tiles."""
        whole = jnp.concatenate([x.reshape(p, -1, *x.shape[2:]) for x in parts], axis=1)
        padding = [(0, 0), (0, -whole.shape[1] % tile)] + [(0, 0)] * (whole.ndim - 2)
        return jnp.pad(whole, padding, constant_values=fill)

    # A valid prefix position gets segment 1, which is that of every valid token of the rows.
    ids = splash.SegmentIds(
        q=sequence(segments, tile=tile_q, fill=PADDING),
        kv=sequence(valid.astype(segments.dtype), segments, tile=tile_k, fill=PADDING),
    )
    shape = (ids.q.shape[1], ids.kv.shape[1])
    mask = mask_lib.MultiHeadMask([_mask(shape, prefix=s, row=t, rows=b // p, causal=causal)] * n)
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
        sequence(q, tile=tile_q),
        sequence(prefix_k, k, tile=tile_k),
        sequence(prefix_v, v, tile=tile_k),
    ]
    # The kernel wants heads before positions, and takes one sequence at a time.
    out: Any = jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in heads), ids)
    return out.swapaxes(1, 2)[:, :queries].reshape(b, t, n, h)


def _tile(length: int) -> int:
    """The tile that cuts `length` into the fewest parts, with the least padding."""
    parts = _ceil_div(length, BLOCK)
    return _ceil_div(length, parts * LANES) * LANES


def _ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def _mask(
    shape: tuple[int, int], *, prefix: int, row: int, rows: int, causal: bool
) -> mask_lib.Mask:
    if not causal:
        return mask_lib.FullMask(shape)
    if rows == 1:
        return mask_lib.CausalMask(shape, offset=prefix)
    return GroupMask(*shape, prefix, row)


@dataclasses.dataclass(frozen=True)
class GroupMask(mask_lib.Mask):
    """The mask of a group: a query sees the whole prefix, and its own row causally.

                 prefix   row 1    row 2
        row 1    # # #    # . .    . . .
                 # # #    # # .    . . .
                 # # #    # # #    . . .
        row 2    # # #    . . .    # . .
                 # # #    . . .    # # .
                 # # #    . . .    # # #

    The kernel computes it tile by tile, and skips tiles without any visible key.

    Args:
        queries: length of the padded queries.
        keys: length of the padded keys.
        prefix: length of the prefix.
        row: length of a row.
    """

    queries: int
    keys: int
    prefix: int
    row: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.queries, self.keys

    @property
    def q_sequence(self) -> np.ndarray:
        # (row << bits) | place in the row: the kernel gets both by shifts, without a division.
        row, place = np.divmod(np.arange(self.queries, dtype=np.int32), np.int32(self.row))
        return row << self._bits | place

    @property
    def _bits(self) -> int:
        return (self.row - 1).bit_length()

    def mask_function(self, q: Any, k: Any) -> Any:
        """Whether the query numbered q (see `q_sequence`) sees key position k."""
        place = q & ((1 << self._bits) - 1)
        start = self.prefix + (q >> self._bits) * self.row
        return (k < self.prefix) | ((k >= start) & (k <= start + place))

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        return self.mask_function(self.q_sequence[idx[0], None], np.arange(self.keys)[idx[1]])
