"""Attention in plain XLA, for any device, in tiles of queries and keys.

A tile of queries takes its keys tile by tile and skips the tiles that it does not see: the cost
follows the visible pairs, not the square of the row. The backward pass computes the scores again
from the log-sum-exp, as FlashAttention does: on CPU, saving and loading scores takes several times
as long as computing them. Both passes hold the scores of one pair of tiles at a time.

Softmax is in float32, as are all sums over keys: in bfloat16 they would lose small weights.

Shapes: b rows; t positions of a row, c of a tile, s keys; k kv heads, r query heads per kv head,
h head_dim.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from models.attention.target import MASKED, SAVED, RowLayout, pad_rows, visible_tiles

# Most queries of a tile of packed rows, and fewest of a longer row without packing; in causal rows
# also keys. Small tiles follow closely which keys are seen, large ones make better products.
TILE = 64
LARGE_TILE = 256


class _Keys(NamedTuple):
    """Keys and values, heads before positions."""

    k: Float[Array, "b k t h"]
    v: Float[Array, "b k t h"]


class _Queries(NamedTuple):
    """Queries, and what the backward pass knows of each."""

    q: Float[Array, "b k t r h"]
    logsumexp: Float[Array, "b k t r"]
    d_out: Float[Array, "b k t r h"]
    """Gradient of the output."""
    delta: Float[Array, "b k t r"]
    """Product of the output and its gradient."""


class _Partial(NamedTuple):
    """Attention over some of the keys, not yet normalised.

    `values` is the weighted sum of values, `weights` the sum of weights, and `top` the largest
    score. Both sums are divided by exp(top), so that exp never overflows.
    """

    values: Float[Array, "b k t r h"]
    weights: Float[Array, "b k t r"]
    top: Float[Array, "b k t r"]


def attend(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    layout: RowLayout,
) -> Float[Array, "b t n h"]:
    """Compute `attention.attend` in whole tiles."""
    b, t, n, h = q.shape
    kv = k.shape[2]
    segments = jnp.ones((b, t), jnp.int32) if layout.segments is None else layout.segments
    if layout.packed:
        count = -(-t // TILE)
    else:
        count = max(1, t // LARGE_TILE)
        # A row without prompts, in which a token's own part begins with the row. Padding gets a
        # segment of its own.
        starts, shared = jnp.zeros((b, t), jnp.int32), jnp.zeros(b, jnp.int32)
        layout = dataclasses.replace(layout, segments=segments + 1, starts=starts, shared=shared)
    tile = -(-t // count)  # the least padding
    q, k, v = (pad_rows(x, tile) for x in (q, k, v))
    layout = layout.padded(tile)
    # [b, t, n, h] -> [b, k, t, r, h]. Heads come before positions, and the queries of a kv head are
    # neighbours, so that each (row, kv head) is one plain matmul.
    queries = (q * h**-0.5).reshape(b, -1, kv, n // kv, h).transpose(0, 2, 1, 3, 4)
    keys = _Keys(k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))
    out: Any = _attend(queries, keys, layout, tile)
    return out.transpose(0, 2, 1, 3, 4).reshape(b, -1, n, h)[:, :t]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(
    q: Float[Array, "b k t r h"], keys: _Keys, layout: RowLayout, tile: int
) -> Float[Array, "b k t r h"]:
    return _forward(q, keys, layout, tile)[0]


def _forward(q: Float[Array, "b k t r h"], keys: _Keys, layout: RowLayout, tile: int):
    width = _width(tile, q, layout)
    first_keys, count = _tiles_to_visit(layout, tile, width)

    def step(done, query):
        queries = _cut(q, query, tile)

        def add_tile(i, total):
            key = first_keys[query // tile, i]
            scores = _tile_scores(queries, _cut(keys.k, key, width), layout, query, key)
            return _merge(total, _weigh(scores, _cut(keys.v, key, width)))

        values = jnp.zeros(queries.shape, jnp.float32)
        nothing = _Partial(values, values[..., 0], jnp.full_like(values[..., 0], MASKED))
        total = jax.lax.fori_loop(0, count[query // tile], add_tile, nothing)
        tile_out = (total.values / total.weights[..., None]).astype(q.dtype)
        logsumexp = total.top + jnp.log(total.weights)
        return (_put(done[0], tile_out, query), _put(done[1], logsumexp, query)), None

    empty = (jnp.zeros(q.shape, q.dtype), jnp.zeros(q.shape[:-1], jnp.float32))
    (out, logsumexp), _ = jax.lax.scan(step, empty, jnp.arange(0, q.shape[2], tile))
    out = checkpoint_name(out, SAVED)
    return out, (q, keys, layout, out, checkpoint_name(logsumexp, SAVED))


def _backward(tile: int, saved, d_out: Float[Array, "b k t r h"]):
    q, keys, layout, out, logsumexp = saved
    # The gradient of a score is weight * (d_out . v - delta), where delta = d_out . out.
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    queries = _Queries(q, logsumexp, d_out, delta)
    width = _width(tile, q, layout)
    first_keys, count = _tiles_to_visit(layout, tile, width)

    def step(done, query):
        tiles = jax.tree.map(lambda x: _cut(x, query, tile), queries)

        def add_tile(i, sums):
            key = first_keys[query // tile, i]
            k, v = (_cut(x, key, width) for x in keys)
            grads = _grads(tiles, k, v, _tile_scores(tiles.q, k, layout, query, key))
            # Keys are seen by several tiles, so their gradients add up.
            d_k, d_v = (_put(sums[i], _cut(sums[i], key, width) + grads[i], key) for i in (1, 2))
            return sums[0] + grads[0], d_k, d_v

        sums = (jnp.zeros(tiles.q.shape, jnp.float32), *done[1:])
        d_part, *d_keys = jax.lax.fori_loop(0, count[query // tile], add_tile, sums)
        return (_put(done[0], d_part.astype(tiles.q.dtype), query), *d_keys), None

    # Sums over tiles stay in float32 until the end.
    zeros = jnp.zeros(keys.k.shape, jnp.float32)
    empty = (jnp.zeros_like(queries.q), zeros, zeros)
    d_q, *d_keys = jax.lax.scan(step, empty, jnp.arange(0, zeros.shape[2], tile))[0]
    return d_q, _Keys(*(d.astype(x.dtype) for d, x in zip(d_keys, keys, strict=True))), None


_attend.defvjp(_forward, _backward)


def _width(tile: int, q: Float[Array, "b k t r h"], layout: RowLayout) -> int:
    """Return the number of keys that a tile of queries visits at a time."""
    return tile if layout.causal else q.shape[2]


def _tiles_to_visit(
    layout: RowLayout, queries: int, keys: int
) -> tuple[Int[Array, "i j"], Int[Array, " i"]]:
    """Return the first keys of the tiles that each tile of queries sees, and how many of them
    count."""
    seen = visible_tiles(layout, queries, keys).any(axis=0)
    # A stable sort puts the visible tiles first, in their order.
    return jnp.argsort(~seen, axis=1, stable=True) * keys, jnp.sum(seen, axis=1)


def _tile_scores(
    q: Float[Array, "b k c r h"],
    k: Float[Array, "b k s h"],
    layout: RowLayout,
    query: Int[Array, ""],
    key: Int[Array, ""],
) -> Float[Array, "b k c r s"]:
    """Return the scores of queries from position `query` against keys from position `key`."""
    assert layout.segments is not None and layout.starts is not None and layout.shared is not None
    cut = jax.lax.dynamic_slice_in_dim
    c, s = q.shape[2], k.shape[2]
    seen = cut(layout.segments, query, c, 1)[:, :, None] == cut(layout.segments, key, s, 1)[:, None]
    if layout.causal:
        position = key + jnp.arange(s)[None, None]
        seen &= position <= query + jnp.arange(c)[None, :, None]
        own = position >= cut(layout.starts, query, c, 1)[:, :, None]
        seen &= own | (position < layout.shared[:, None, None])
    return jnp.where(seen[:, None, :, None], _scores(q, k), MASKED)


def _cut(
    x: Float[Array, "b k t ..."], first: Int[Array, ""], size: int
) -> Float[Array, "b k c ..."]:
    return jax.lax.dynamic_slice_in_dim(x, first, size, axis=2)


def _put(
    x: Float[Array, "b k t ..."], tile: Float[Array, "b k c ..."], first: Int[Array, ""]
) -> Float[Array, "b k t ..."]:
    return jax.lax.dynamic_update_slice_in_dim(x, tile, first, axis=2)


def _weigh(scores: Float[Array, "b k c r s"], v: Float[Array, "b k s h"]) -> _Partial:
    top = jnp.max(scores, axis=-1)
    weights = jnp.exp(scores - top[..., None])
    return _Partial(_apply(weights.astype(v.dtype), v), jnp.sum(weights, axis=-1), top)


def _merge(a: _Partial, b: _Partial) -> _Partial:
    """Return attention over the keys of both."""
    top = jnp.maximum(a.top, b.top)
    scale_a = jnp.exp(a.top - top)
    scale_b = jnp.exp(b.top - top)
    values = a.values * scale_a[..., None] + b.values * scale_b[..., None]
    return _Partial(values, a.weights * scale_a + b.weights * scale_b, top)


def _grads(
    queries: _Queries,
    k: Float[Array, "b k s h"],
    v: Float[Array, "b k s h"],
    scores: Float[Array, "b k c r s"],
) -> tuple[Float[Array, "b k c r h"], Float[Array, "b k s h"], Float[Array, "b k s h"]]:
    """Return the gradients of queries, keys and values through one set of scores, float32."""
    q, logsumexp, d_out, delta = queries
    weights = jnp.exp(scores - logsumexp[..., None])
    d_v = _collect(weights.astype(d_out.dtype), d_out)
    d_scores = (weights * (_scores(d_out, v) - delta[..., None])).astype(q.dtype)
    return _apply(d_scores, k), _collect(d_scores, q), d_v


# The matmuls below join rows and kv heads into one batch axis: with two, XLA on CPU takes several
# times as long.


def _scores(q: Float[Array, "b k c r h"], k: Float[Array, "b k s h"]) -> Float[Array, "b k c r s"]:
    """Return the products of every query and key."""
    b, n, c, r, h = q.shape
    out = _matmul(q.reshape(b * n, c * r, h), k.reshape(b * n, -1, h), 2, 2)
    return out.reshape(b, n, c, r, -1)


def _apply(
    weights: Float[Array, "b k c r s"], v: Float[Array, "b k s h"]
) -> Float[Array, "b k c r h"]:
    """Return the weighted sum of values, per query."""
    b, n, c, r, s = weights.shape
    out = _matmul(weights.reshape(b * n, c * r, s), v.reshape(b * n, s, -1), 2, 1)
    return out.reshape(b, n, c, r, -1)


def _collect(
    weights: Float[Array, "b k c r s"], x: Float[Array, "b k c r h"]
) -> Float[Array, "b k s h"]:
    """Return the weighted sum over queries, per key."""
    b, n, c, r, s = weights.shape
    out = _matmul(weights.reshape(b * n, c * r, s), x.reshape(b * n, c * r, -1), 1, 1)
    return out.reshape(b, n, s, -1)


def _matmul(
    a: Float[Array, "x i j"], b: Float[Array, "x u w"], contract_a: int, contract_b: int
) -> Float[Array, "x y z"]:
    dimensions = (((contract_a,), (contract_b,)), ((0,), (0,)))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
