"""Attention in packed rows on GPU: a flash kernel in Triton that visits only the visible tiles.

Each program of the grid owns a tile of queries; for the gradients of keys and values, a tile of
keys. It visits the tiles that its own one sees, or those that see it, from a list made at run time.
As in FlashAttention, the backward pass computes the weights again from the log-sum-exp. Softmax and
sums are in float32, with powers of 2.

Shapes: b rows of t positions, in whole tiles; n query heads, k kv heads, r query heads per kv head,
h head_dim. The kernel must run in a shard_map over several devices (`spread`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from models.attention.target import MASKED, SAVED, RowLayout, pad_rows, visible_tiles

# Size of a tile, in queries and in keys. With this size, as with the numbers of warps and stages
# below, an H200 was fastest.
TILE = 64
LOG2_E = math.log2(math.e)


class _Visits(NamedTuple):
    """For each tile, the tiles that it visits, of which the first `count` matter."""

    tiles: Int[Array, "b 1 i j"]
    count: Int[Array, "b 1 i"]


class _VisitSchedule(NamedTuple):
    """What the kernels read about packed rows.

    `positions` has the attributes of each position (`RowLayout.attributes`).
    """

    positions: Int[Array, "b 1 3 t"]
    of_queries: _Visits
    of_keys: _Visits


def supports(q: Float[Array | jax.ShapeDtypeStruct, "b t n h"]) -> bool:
    """Return whether the kernel can take these arrays, which need 16 bits and heads of a power of
    two."""
    return q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[3] in (16, 32, 64, 128)


def attend(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    layout: RowLayout,
    interpret: bool,
) -> Float[Array, "b t n h"]:
    """Compute `attention.attend` of packed rows, which are causal."""
    queries, keys, values = (pad_rows(x, TILE).swapaxes(1, 2) for x in (q, k, v))
    out: Any = _attend(queries, keys, values, _schedule(layout.padded(TILE)), interpret)
    return out.swapaxes(1, 2)[:, : q.shape[1]]


def _schedule(layout: RowLayout) -> _VisitSchedule:
    def visits(seen: Bool[Array, "b 1 i j"]) -> _Visits:
        # A stable sort puts the visible tiles first, in their order.
        return _Visits(jnp.argsort(~seen, stable=True), jnp.sum(seen, axis=-1))

    seen = visible_tiles(layout, TILE, TILE)[:, None]
    positions = jnp.stack(layout.attributes(), axis=1)[:, None]
    return _VisitSchedule(positions, visits(seen), visits(seen.swapaxes(2, 3)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
    q: Float[Array, "b n t h"], k: Array, v: Array, schedule: _VisitSchedule, interpret: bool
) -> Float[Array, "b n t h"]:
    return _forward(q, k, v, schedule, interpret)[0]


def _forward(q: Array, k: Array, v: Array, schedule: _VisitSchedule, interpret: bool):
    outs = q, jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    out, logsumexp = _call(_forward_kernel, (schedule, q, k, v), outs, 3, interpret)
    out = checkpoint_name(out, SAVED)
    return out, (q, k, v, schedule, out, checkpoint_name(logsumexp, SAVED))


def _backward(interpret: bool, saved: Any, d_out: Float[Array, "b n t h"]):
    q, k, v, schedule, out, logsumexp = saved
    # The gradient of a score is weight * (d_out . v - delta), where delta = d_out . out.
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    queries = q, d_out, logsumexp, delta
    (d_q,) = _call(_d_queries_kernel, (schedule, queries, k, v), (q,), 2, interpret)
    # [b, n, t, ...] -> [b, k, r, t, ...]
    by_kv_head = [x.reshape(*k.shape[:2], -1, *x.shape[2:]) for x in queries]
    d_k, d_v = _call(_d_keys_kernel, (schedule, by_kv_head, k, v), (k, v), 2, interpret)
    return d_q, d_k, d_v, None


_attend.defvjp(_forward, _backward)


def _call(
    kernel: Callable[..., None], arrays: Any, outs: Sequence[Any], stages: int, interpret: bool
) -> Any:
    """Run a kernel for every tile, head and row of the first result, on whole rows of heads.

    Args:
        kernel: The kernel.
        arrays: What it reads.
        outs: Arrays of the shapes and types that it writes.
        stages: How many tiles are loaded ahead.
        interpret: Whether to run without a GPU.
    """
    rows, heads, t = outs[0].shape[:3]

    def spec(x: Any) -> pl.BlockSpec:
        # So many heads of the result share one of this array.
        sharing = heads // x.shape[1]
        inner = (0,) * (x.ndim - 2)
        return pl.BlockSpec(
            (None, None, *x.shape[2:]),
            lambda tile, head, row: (row, jax.lax.div(head, sharing), *inner),
        )

    return pl.pallas_call(
        kernel,
        grid=(t // TILE, heads, rows),
        in_specs=jax.tree.map(spec, arrays),
        out_specs=[spec(x) for x in outs],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=stages),
        interpret=interpret,
        name="packed_attention" + kernel.__name__.removesuffix("_kernel"),
    )(*arrays)


def _cut(tile: Any) -> Any:
    """Return the positions of a tile."""
    return pl.ds(tile * TILE, TILE)


def _dot(a: Array, b: Array, contract: int) -> Float[Array, "i j"]:
    dimensions = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _scores(q: Array, k: Array, positions: Any, tiles: tuple[Any, Any], axis: int) -> Array:
    """Return the scores of a tile of queries against one of keys, in powers of 2; keys are along
    `axis`."""
    query, key = (tile * TILE + jnp.arange(TILE) for tile in tiles)
    group, first, prompt = (positions[i, _cut(tiles[i // 2])] for i in range(3))
    query, group, first = (jnp.expand_dims(x, axis) for x in (query, group, first))
    key, prompt = (jnp.expand_dims(x, 1 - axis) for x in (key, prompt))
    seen = (key <= query) & ((key >= first) | (prompt == group))
    scores = _dot(*((q, k) if axis else (k, q)), 1) * (q.shape[1] ** -0.5 * LOG2_E)
    return jnp.where(seen, scores, MASKED)


def _forward_kernel(schedule, q, k, v, out, logsumexp):
    queries = pl.program_id(0)
    own = _cut(queries)
    tile = q[own, :]

    def visit(i, sums):
        values, total, before = sums
        keys = schedule.of_queries.tiles[queries, i]
        scores = _scores(tile, k[_cut(keys), :], schedule.positions, (queries, keys), 1)
        top = jnp.maximum(before, scores.max(axis=1))
        weights = jnp.exp2(scores - top[:, None])
        shrink = jnp.exp2(before - top)
        more = _dot(weights.astype(v.dtype), v[_cut(keys), :], 0)
        return values * shrink[:, None] + more, total * shrink + weights.sum(axis=1), top

    zeros = jnp.zeros(tile.shape, jnp.float32)
    nothing = zeros, jnp.zeros(TILE, jnp.float32), jnp.full(TILE, MASKED, jnp.float32)
    count = schedule.of_queries.count[queries]
    values, total, top = jax.lax.fori_loop(0, count, visit, nothing)
    out[own, :] = (values / total[:, None]).astype(out.dtype)
    logsumexp[own] = top + jnp.log2(total)


def _d_queries_kernel(schedule, queries, k, v, d_q):
    tile = pl.program_id(0)
    own = _cut(tile)
    q, d_out, logsumexp, delta = (x[own] for x in queries)

    def visit(i, total):
        other = schedule.of_queries.tiles[tile, i]
        keys, values = k[_cut(other), :], v[_cut(other), :]
        scores = _scores(q, keys, schedule.positions, (tile, other), 1)
        weights = jnp.exp2(scores - logsumexp[:, None])
        d_scores = weights * (_dot(d_out, values, 1) - delta[:, None])
        return total + _dot(d_scores.astype(keys.dtype), keys, 0)

    total = jnp.zeros(q.shape, jnp.float32)
    total = jax.lax.fori_loop(0, schedule.of_queries.count[tile], visit, total)
    d_q[own, :] = (total * q.shape[1] ** -0.5).astype(d_q.dtype)


def _d_keys_kernel(schedule, queries, k, v, d_k, d_v):
    tile = pl.program_id(0)
    own = _cut(tile)
    keys, values = k[own, :], v[own, :]
    total = (jnp.zeros(keys.shape, jnp.float32),) * 2
    for head in range(queries[0].shape[0]):

        def visit(i, total, head=head):
            other = schedule.of_keys.tiles[tile, i]
            q, d_out, logsumexp, delta = (x[head, _cut(other)] for x in queries)
            # Keys x queries, so that every product has its rows in place.
            scores = _scores(q, keys, schedule.positions, (other, tile), 0)
            weights = jnp.exp2(scores - logsumexp[None])
            d_scores = weights * (_dot(values, d_out, 1) - delta[None])
            more_k = _dot(d_scores.astype(q.dtype), q, 0)
            more_v = _dot(weights.astype(d_out.dtype), d_out, 0)
            return total[0] + more_k, total[1] + more_v

        total = jax.lax.fori_loop(0, schedule.of_keys.count[tile], visit, total)
    d_k[own, :] = (total[0] * keys.shape[1] ** -0.5).astype(d_k.dtype)
    d_v[own, :] = total[1].astype(d_v.dtype)
