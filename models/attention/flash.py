"""Attention in packed rows on TPU: a flash kernel that visits only the tiles that are visible.

Splash, which serves rows without shared prompts, walks a grid of fixed width and skips what its
mask hides. In a packed row nearly everything is hidden: a tile of queries sees its prompt and its
own segments. So the visible tiles become a list at run time, and the grid is the list:

    keys     0 1 2 3       visible tiles      by queries: (0,0) (1,1) (2,0) (2,2) (3,0) (3,3)
    queries 0  #           (# prompts of      by keys:    (0,0) (2,0) (3,0) (1,1) (2,2) (3,3)
            1    #         one group, two
            2  #   #       segments; tile 1
            3  #     #     another group)

The forward pass and the gradient of queries go by queries, the gradients of keys and values by
keys: each output tile is summed in scratch memory and written once. As in FlashAttention, the
backward pass computes the weights again from the log-sum-exp. The query heads of a kv head share a
tile of keys and its mask. Softmax and sums are in float32.

Shapes: t positions of all rows, joined and padded to whole tiles; k kv heads, r query heads per kv
head, h head_dim. The kernel must run in a shard_map over several devices (`spread`).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from models.attention.target import MASKED, SAVED, RowLayout, pad_rows, visible_tiles

# Size of a tile, in queries and in keys; shorter rows have smaller ones.
TILE = 512
# Registers hold 8 x 128 numbers: one per position is stored along one side, repeated or padded.
SUBLANES = 8
LANES = 128
# The axis of positions in the shape of a block.
TILED = "tiled"


class _TileSchedule(NamedTuple):
    """What the kernels read about a packed row.

    The first four of `rows`, and of `columns`, are the attributes of each position
    (`RowLayout.attributes`), and the position itself. A list has the tile numbers (queries, keys)
    of its visible tiles between two entries of -1.
    """

    rows: Int[Array, "8 t"]
    columns: Int[Array, "t 128"]
    by_queries: Int[Array, "2 n"]
    by_keys: Int[Array, "2 n"]
    count: Int[Array, ""]


def attend(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    layout: RowLayout,
    interpret: bool,
) -> Float[Array, "b t n h"]:
    """Compute `attention.attend` of packed rows, which are causal."""
    b, t, n, h = q.shape
    kv = k.shape[2]
    tile = min(TILE, -(-t // LANES) * LANES)

    schedule = _schedule(layout.padded(tile), tile)
    # [b, t, n, h] -> [k, r, b * t, h], and [b, t, k, h] -> [k, b * t, h]
    queries = pad_rows(q * h**-0.5, tile).reshape(-1, kv, n // kv, h).transpose(1, 2, 0, 3)
    keys, values = (pad_rows(x, tile).reshape(-1, kv, h).swapaxes(0, 1) for x in (k, v))
    out: Any = _attend(queries, keys, values, schedule, tile, interpret)
    return out.transpose(2, 0, 1, 3).reshape(b, -1, n, h)[:, :t]


def _schedule(layout: RowLayout, tile: int) -> _TileSchedule:
    group, first, prompt = layout.attributes()
    b, t = group.shape
    # Of all rows, joined.
    position = jnp.arange(b * t).reshape(b, t)
    attributes = (group, first + position[:, :1], prompt, position)
    seen = visible_tiles(layout, tile, tile)
    number = jnp.arange(b * (t // tile)).reshape(b, -1)
    queries = jnp.broadcast_to(number[:, :, None], seen.shape)
    keys = jnp.broadcast_to(number[:, None], seen.shape)
    most = b * (t // tile) * (t // tile + 1) // 2

    def visit(*order: int) -> Int[Array, "2 n"]:
        """Return the visible tiles, with the last axis of `order` running fastest."""
        numbers = jnp.nonzero(seen.transpose(order).reshape(-1), size=most, fill_value=-1)[0]
        tiles = jnp.stack([queries, keys]).transpose(0, *(1 + axis for axis in order))
        tiles = jnp.where(numbers < 0, -1, tiles.reshape(2, -1)[:, numbers])
        return jnp.pad(tiles, [(0, 0), (1, 1)], constant_values=-1)

    attributes = jnp.stack([x.reshape(-1) for x in attributes])
    rows = jnp.pad(attributes, [(0, SUBLANES - 4), (0, 0)])
    columns = jnp.pad(attributes.T, [(0, 0), (0, LANES - 4)])
    return _TileSchedule(rows, columns, visit(0, 1, 2), visit(0, 2, 1), jnp.sum(seen))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(
    q: Float[Array, "k r t h"],
    k: Array,
    v: Array,
    schedule: _TileSchedule,
    tile: int,
    interpret: bool,
) -> Float[Array, "k r t h"]:
    return _forward(q, k, v, schedule, tile, interpret)[0]


def _forward(q: Array, k: Array, v: Array, schedule: _TileSchedule, tile: int, interpret: bool):
    _, r, _, h = q.shape
    block = functools.partial(_block, tile)
    queries, keys = block(0, None, r, TILED, h), block(1, None, TILED, h)
    statistics = pltpu.VMEM((r, tile, LANES), jnp.float32)
    out, logsumexp = _call(
        _forward_kernel,
        (schedule.by_queries, q, k, v, schedule.columns, schedule.rows),
        [queries, keys, keys, block(0, TILED, LANES), block(1, SUBLANES, TILED)],
        [(q.shape, q.dtype, queries), (q.shape[:3], jnp.float32, block(0, None, r, TILED))],
        [statistics, statistics, pltpu.VMEM((r, tile, h), jnp.float32)],
        (schedule.count, interpret),
    )
    out = checkpoint_name(out, SAVED)
    return out, (q, k, v, schedule, out, checkpoint_name(logsumexp, SAVED))


def _backward(tile: int, interpret: bool, saved: Any, d_out: Float[Array, "k r t h"]):
    q, k, v, schedule, out, logsumexp = saved
    _, r, _, h = q.shape
    # The gradient of a score is weight * (d_out . v - delta), where delta = d_out . out.
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    block = functools.partial(_block, tile)
    queries, keys = block(0, None, r, TILED, h), block(1, None, TILED, h)
    arrays = (q, k, v, d_out, logsumexp, delta)
    specs = [queries, keys, keys, queries] + [block(0, None, r, TILED)] * 2
    (d_q,) = _call(
        _d_queries_kernel,
        (schedule.by_queries, *arrays, schedule.columns, schedule.rows),
        [*specs, block(0, TILED, LANES), block(1, SUBLANES, TILED)],
        [(q.shape, q.dtype, queries)],
        [pltpu.VMEM((r, tile, h), jnp.float32)],
        (schedule.count, interpret),
    )
    d_k, d_v = _call(
        _d_keys_kernel,
        (schedule.by_keys, *arrays, schedule.rows, schedule.columns),
        [*specs, block(0, SUBLANES, TILED), block(1, TILED, LANES)],
        [(k.shape, k.dtype, keys), (v.shape, v.dtype, keys)],
        [pltpu.VMEM((tile, h), jnp.float32)] * 2,
        (schedule.count, interpret),
    )
    return d_q, d_k, d_v, None


_attend.defvjp(_forward, _backward)


def _block(tile: int, side: int, *shape: Any) -> pl.BlockSpec:
    """Return the part of an array that a visit reads or writes: of its queries (side 0) or keys
    (side 1).

    An entry of `shape` is None for the axis of kv heads, TILED for positions, or a whole length.
    """

    def index(head: Any, visit: Any, tiles: Any) -> tuple[Any, ...]:
        # The list begins with an entry that is no tile.
        index_of = {None: head, TILED: tiles[side, visit + 1]}
        return tuple(index_of.get(x, 0) for x in shape)

    return pl.BlockSpec(tuple(tile if x is TILED else x for x in shape), index)


def _call(kernel: Any, arrays: Any, specs: Any, outs: Any, scratch: Any, run: Any) -> Any:
    """Run a kernel for every kv head and every tile of the list, which is the first array."""
    count, interpret = run
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(arrays[1].shape[0], count),
            in_specs=specs,
            out_specs=[spec for _, _, spec in outs],
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in outs],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="packed_attention" + kernel.__name__.removesuffix("_kernel"),
    )(*arrays)


def _ends(tiles: Any, side: int) -> tuple[Any, Any]:
    """Return whether this visit is the first, and the last, of its tile of queries (side 0) or
    keys."""
    before, own, after = (tiles[side, pl.program_id(1) + i] for i in range(3))
    return before != own, after != own


def _seen(queries: list[Array], keys: list[Array]) -> Array:
    """Return the rule of `attention.attend`; one side is a column and the other a row."""
    group, first, _, query = queries
    _, _, prompt, key = keys
    return (key <= query) & ((key >= first) | (prompt == group))


def _attributes(ref: Any, axis: int) -> list[Array]:
    """Return the four attributes of a tile's positions, as rows (axis 0) or as columns (axis 1)."""
    return [ref[i : i + 1, :] if axis == 0 else ref[:, i : i + 1] for i in range(4)]


def _dot(a: Array, b: Array, contract: tuple[int, int] = (1, 0)) -> Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _forward_kernel(
    tiles, q, k, v, column, row, out, logsumexp, running_max, running_sum, accumulator
):
    first, last = _ends(tiles, 0)

    @pl.when(first)
    def _():
        running_max[...] = jnp.full_like(running_max, MASKED)
        running_sum[...] = jnp.zeros_like(running_sum)
        accumulator[...] = jnp.zeros_like(accumulator)

    seen = _seen(_attributes(column, 1), _attributes(row, 0))
    h = v.shape[-1]
    for i in range(q.shape[0]):
        scores = jnp.where(seen, _dot(q[i], k[...], (1, 1)), MASKED)
        # Statistics are repeated along the lanes.
        before = running_max[i]
        after = jnp.maximum(before, scores.max(axis=1, keepdims=True))
        weights = jnp.exp(scores - jnp.tile(after, (1, scores.shape[1] // LANES)))
        scale = jnp.exp(before - after)
        running_max[i] = after
        running_sum[i] = scale * running_sum[i] + weights.sum(axis=1, keepdims=True)
        wide = jnp.tile(scale, (1, -(-h // LANES)))[:, :h]
        accumulator[i] = wide * accumulator[i] + _dot(weights.astype(v.dtype), v[...])

    @pl.when(last)
    def _():
        for i in range(q.shape[0]):
            divisor = jnp.tile(running_sum[i], (1, -(-h // LANES)))[:, :h]
            out[i] = (accumulator[i] / divisor).astype(out.dtype)
            logsumexp[i : i + 1, :] = (running_max[i] + jnp.log(running_sum[i])).T[:1]


def _d_queries_kernel(tiles, q, k, v, d_out, logsumexp, delta, column, row, d_q, accumulator):
    first, last = _ends(tiles, 0)

    @pl.when(first)
    def _():
        accumulator[...] = jnp.zeros_like(accumulator)

    seen = _seen(_attributes(column, 1), _attributes(row, 0))
    for i in range(q.shape[0]):
        scores = jnp.where(seen, _dot(q[i], k[...], (1, 1)), MASKED)
        weights = jnp.exp(scores - logsumexp[i][:, None])
        d_scores = weights * (_dot(d_out[i], v[...], (1, 1)) - delta[i][:, None])
        accumulator[i] += _dot(d_scores.astype(k.dtype), k[...])

    @pl.when(last)
    def _():
        d_q[...] = accumulator[...].astype(d_q.dtype)


def _d_keys_kernel(tiles, q, k, v, d_out, logsumexp, delta, row, column, d_k, d_v, sum_k, sum_v):
    first, last = _ends(tiles, 1)

    @pl.when(first)
    def _():
        sum_k[...] = sum_v[...] = jnp.zeros_like(sum_k)

    # Scores are transposed, keys x queries, so that every product has its rows in place.
    seen = _seen(_attributes(row, 0), _attributes(column, 1))
    for i in range(q.shape[0]):
        scores = jnp.where(seen, _dot(k[...], q[i], (1, 1)), MASKED)
        weights = jnp.exp(scores - logsumexp[i : i + 1, :])
        sum_v[...] += _dot(weights.astype(d_out.dtype), d_out[i])
        d_scores = weights * (_dot(v[...], d_out[i], (1, 1)) - delta[i : i + 1, :])
        sum_k[...] += _dot(d_scores.astype(q.dtype), q[i])

    @pl.when(last)
    def _():
        d_k[...] = sum_k[...].astype(d_k.dtype)
        d_v[...] = sum_v[...].astype(d_v.dtype)
