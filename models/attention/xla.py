"""Attention in plain XLA, for any device, in chunks of queries; packed rows in tiles.

The backward pass computes the scores again from the log-sum-exp, as FlashAttention does: on CPU,
saving and loading scores takes several times as long as computing them. Both passes hold the scores
of one chunk at a time. The result does not depend on the chunk size. In packed rows, a chunk takes
its keys tile by tile and skips the tiles that it does not see: the cost follows the visible pairs,
not the square of the row.

Softmax is in float32, as are all sums over keys: in bfloat16 they would lose small weights.

Shapes: b rows; t positions of a row, c of a chunk, s keys; k kv heads, r query heads per kv head,
h head_dim.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from models.attention.target import MASKED, SAVED, RowLayout, pad_rows, visible_tiles

# Queries of a chunk.
QUERY_CHUNK = 128
# Upper bound on the spans of whole chunks, each a loop, that causal attention compiles to.
SPANS = 8
# Largest tile of a packed row, in queries and in keys: on CPU, 128 takes longer.
TILE = 64


class _Keys(NamedTuple):
    """Keys and values, heads before positions: those of each row, and those of its prefix."""

    k: Float[Array, "b k t h"]
    v: Float[Array, "b k t h"]
    prefix_k: Float[Array, "b k s h"] | None
    prefix_v: Float[Array, "b k s h"] | None


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
    prefix: tuple[Float[Array, "b s k h"], Float[Array, "b s k h"]] | None,
    layout: RowLayout,
) -> Float[Array, "b t n h"]:
    """Compute `attention.attend` in chunks of `QUERY_CHUNK` queries."""
    b, t, n, h = q.shape
    kv = k.shape[2]
    chunk = QUERY_CHUNK
    if layout.packed:
        # Whole tiles.
        chunk = min(chunk, TILE)
        q, k, v = (pad_rows(x, chunk) for x in (q, k, v))
        layout = layout.padded(chunk)
    # [b, t, n, h] -> [b, k, t, r, h]. Heads come before positions, and the queries of a kv head are
    # neighbours, so that each (row, kv head) is one plain matmul.
    queries = (q * h**-0.5).reshape(b, -1, kv, n // kv, h).transpose(0, 2, 1, 3, 4)
    prefix_k = prefix_v = None
    if prefix is not None:
        prefix_k = prefix[0].transpose(0, 2, 1, 3)
        prefix_v = prefix[1].transpose(0, 2, 1, 3)
    keys = _Keys(k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), prefix_k, prefix_v)
    out: Any = _attend(queries, keys, layout, chunk)
    return out.transpose(0, 2, 1, 3, 4).reshape(b, -1, n, h)[:, :t]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(
    q: Float[Array, "b k t r h"], keys: _Keys, layout: RowLayout, chunk: int
) -> Float[Array, "b k t r h"]:
    return _forward(q, keys, layout, chunk)[0]


def _forward(q: Float[Array, "b k t r h"], keys: _Keys, layout: RowLayout, chunk: int):
    def step(done, first, span: _Span):
        out, logsumexp = done
        queries = _cut(q, first, span.size)
        scores = _own_scores(queries, keys.k[:, :, : span.end], layout, first)
        total = _weigh(scores, keys.v[:, :, : span.end])
        if keys.prefix_k is not None and keys.prefix_v is not None:
            scores = _prefix_scores(queries, keys.prefix_k, layout.prefix_mask)
            total = _merge(total, _weigh(scores, keys.prefix_v))
        chunk_out = (total.values / total.weights[..., None]).astype(q.dtype)
        chunk_logsumexp = total.top + jnp.log(total.weights)
        return _put(out, chunk_out, first), _put(logsumexp, chunk_logsumexp, first)

    if layout.packed:
        out, logsumexp = _forward_packed(q, keys, layout, chunk)
    else:
        empty = (jnp.zeros(q.shape, q.dtype), jnp.zeros(q.shape[:-1], jnp.float32))
        out, logsumexp = _over_chunks(step, empty, q.shape[2], layout.causal, chunk)
    out = checkpoint_name(out, SAVED)
    return out, (q, keys, layout, out, checkpoint_name(logsumexp, SAVED))


def _backward(chunk: int, saved, d_out: Float[Array, "b k t r h"]):
    q, keys, layout, out, logsumexp = saved
    # The gradient of a score is weight * (d_out . v - delta), where delta = d_out . out.
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    queries = _Queries(q, logsumexp, d_out, delta)

    def step(done, first, span: _Span):
        d_q, d_keys = done
        chunks = jax.tree.map(lambda x: _cut(x, first, span.size), queries)
        k = keys.k[:, :, : span.end]
        v = keys.v[:, :, : span.end]
        scores = _own_scores(chunks.q, k, layout, first)
        d_part, d_k, d_v = _grads(chunks, k, v, scores)
        # Keys are seen by several chunks, so their gradients add up.
        d_k = _put(d_keys.k, d_keys.k[:, :, : span.end] + d_k, 0)
        d_v = _put(d_keys.v, d_keys.v[:, :, : span.end] + d_v, 0)
        d_prefix = (None, None)
        if keys.prefix_k is not None:
            scores = _prefix_scores(chunks.q, keys.prefix_k, layout.prefix_mask)
            more, *d_prefix = _grads(chunks, keys.prefix_k, keys.prefix_v, scores)
            d_part = d_part + more
            d_prefix = [d_keys.prefix_k + d_prefix[0], d_keys.prefix_v + d_prefix[1]]
        return _put(d_q, d_part.astype(q.dtype), first), _Keys(d_k, d_v, *d_prefix)

    # Sums over chunks stay in float32 until the end.
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), keys)
    empty = (jnp.zeros(q.shape, q.dtype), sums)
    if layout.packed:
        d_q, d_keys = _backward_packed(queries, keys, layout, chunk)
    else:
        d_q, d_keys = _over_chunks(step, empty, q.shape[2], layout.causal, chunk)
    return d_q, jax.tree.map(lambda d, x: d.astype(x.dtype), d_keys, keys), None


_attend.defvjp(_forward, _backward)


def _forward_packed(q: Float[Array, "b k t r h"], keys: _Keys, layout: RowLayout, tile: int):
    """Return outputs and log-sum-exps of packed rows; `tile` divides their length."""
    first_keys, count = _tiles_to_visit(layout, tile)

    def step(done, query):
        queries = _cut(q, query, tile)

        def add_tile(i, total):
            key = first_keys[query // tile, i]
            scores = _tile_scores(queries, keys.k, layout, query, key)
            return _merge(total, _weigh(scores, _cut(keys.v, key, tile)))

        values = jnp.zeros(queries.shape, jnp.float32)
        nothing = _Partial(values, values[..., 0], jnp.full_like(values[..., 0], MASKED))
        total = jax.lax.fori_loop(0, count[query // tile], add_tile, nothing)
        chunk_out = (total.values / total.weights[..., None]).astype(q.dtype)
        logsumexp = total.top + jnp.log(total.weights)
        return (_put(done[0], chunk_out, query), _put(done[1], logsumexp, query)), None

    empty = (jnp.zeros(q.shape, q.dtype), jnp.zeros(q.shape[:-1], jnp.float32))
    return jax.lax.scan(step, empty, jnp.arange(0, q.shape[2], tile))[0]


def _backward_packed(queries: _Queries, keys: _Keys, layout: RowLayout, tile: int):
    """Return the gradients of queries, keys and values."""
    first_keys, count = _tiles_to_visit(layout, tile)

    def step(done, query):
        chunks = jax.tree.map(lambda x: _cut(x, query, tile), queries)

        def add_tile(i, sums):
            key = first_keys[query // tile, i]
            k, v = (_cut(x, key, tile) for x in keys[:2])
            grads = _grads(chunks, k, v, _tile_scores(chunks.q, keys.k, layout, query, key))
            d_k, d_v = (_put(sums[i], _cut(sums[i], key, tile) + grads[i], key) for i in (1, 2))
            return sums[0] + grads[0], d_k, d_v

        sums = (jnp.zeros(chunks.q.shape, jnp.float32), *done[1:])
        d_part, *d_keys = jax.lax.fori_loop(0, count[query // tile], add_tile, sums)
        return (_put(done[0], d_part.astype(chunks.q.dtype), query), *d_keys), None

    zeros = jnp.zeros(keys.k.shape, jnp.float32)
    empty = (jnp.zeros_like(queries.q), zeros, zeros)
    d_q, d_k, d_v = jax.lax.scan(step, empty, jnp.arange(0, zeros.shape[2], tile))[0]
    return d_q, _Keys(d_k, d_v, None, None)


def _tiles_to_visit(layout: RowLayout, tile: int) -> tuple[Int[Array, "i j"], Int[Array, " i"]]:
    """Return the first keys of the tiles that each chunk of queries sees, and how many of them
    count."""
    seen = visible_tiles(layout, tile, tile).any(axis=0)
    # A stable sort puts the visible tiles first, in their order.
    return jnp.argsort(~seen, axis=1, stable=True) * tile, jnp.sum(seen, axis=1)


def _tile_scores(
    q: Float[Array, "b k c r h"],
    k: Float[Array, "b k t h"],
    layout: RowLayout,
    query: Int[Array, ""],
    key: Int[Array, ""],
) -> Float[Array, "b k c r s"]:
    """Return the scores of the queries from position `query` against a tile of keys from position
    `key`."""
    assert layout.segments is not None and layout.starts is not None and layout.shared is not None
    tile = q.shape[2]
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=tile, axis=1)
    position = key + jnp.arange(tile)[None, None]
    seen = cut(layout.segments, query)[:, :, None] == cut(layout.segments, key)[:, None]
    seen &= position <= query + jnp.arange(tile)[None, :, None]
    own = position >= cut(layout.starts, query)[:, :, None]
    seen &= own | (position < layout.shared[:, None, None])
    return jnp.where(seen[:, None, :, None], _scores(q, _cut(k, key, tile)), MASKED)


class _Span(NamedTuple):
    """One loop: `count` chunks of `size` queries from query `first`, seeing keys before `end`."""

    first: int
    count: int
    size: int
    end: int


def _spans(t: int, causal: bool, chunk: int) -> list[_Span]:
    """Group the chunks of t queries into loops.

    Every pass of a loop takes the same number of keys, but a causal chunk sees more keys than the
    one before it. With 6 chunks and 3 loops (# computed and needed, o computed and masked):

        loop 0   # o
                 # #
        loop 1   # # # o
                 # # # #
        loop 2   # # # # # o
                 # # # # # #

    There are at most `SPANS` of them, so the program does not grow with t, and the masked scores
    beyond the causal frontier are about t^2 / (2 SPANS). A shorter last chunk is a span of its own.
    """
    whole, rest = divmod(t, chunk)
    loops = SPANS if causal else 1
    chunks_per_loop = max(1, (whole + loops - 1) // loops)
    spans = []
    for first in range(0, whole, chunks_per_loop):
        after = min(first + chunks_per_loop, whole)
        end = after * chunk if causal else t
        spans.append(_Span(first * chunk, after - first, chunk, end))
    if rest:
        spans.append(_Span(whole * chunk, 1, rest, t))
    return spans


def _over_chunks(step, done, t: int, causal: bool, chunk: int):
    """Run `done = step(done, first query, span)` for every chunk."""
    for span in _spans(t, causal, chunk):
        if span.count == 1:
            done = step(done, span.first, span)
        else:
            # A loop: if the chunks were unrolled, XLA on CPU could hold all their scores at once.
            firsts = span.first + span.size * jnp.arange(span.count)
            done = jax.lax.scan(_without_output(step, span), done, firsts)[0]
    return done


def _without_output(step, span: _Span):
    """Return `step` as the body of a scan."""
    return lambda done, first: (step(done, first, span), None)


def _cut(
    x: Float[Array, "b k t ..."],
    first: int | Int[Array, ""],
    size: int,
) -> Float[Array, "b k c ..."]:
    return jax.lax.dynamic_slice_in_dim(x, first, size, axis=2)


def _put(
    x: Float[Array, "b k t ..."],
    chunk: Float[Array, "b k c ..."],
    first: int | Int[Array, ""],
) -> Float[Array, "b k t ..."]:
    return jax.lax.dynamic_update_slice_in_dim(x, chunk, first, axis=2)


def _own_scores(
    q: Float[Array, "b k c r h"],
    k: Float[Array, "b k s h"],
    layout: RowLayout,
    first: int | Int[Array, ""],
) -> Float[Array, "b k c r s"]:
    """Return the scores of the queries from position `first` against the first s keys of their
    row."""
    c = q.shape[2]
    s = k.shape[2]
    scores = _scores(q, k)
    if layout.causal:
        # [c, s] -> [1, 1, c, 1, s]
        earlier = first + jnp.arange(c)[:, None] >= jnp.arange(s)[None, :]
        scores = jnp.where(earlier[None, None, :, None], scores, MASKED)
    if layout.segments is not None:
        own = jax.lax.dynamic_slice_in_dim(layout.segments, first, c, axis=1)
        seen = own[:, :, None] == layout.segments[:, None, :s]
        # [b, c, s] -> [b, 1, c, 1, s]
        scores = jnp.where(seen[:, None, :, None], scores, MASKED)
    return scores


def _prefix_scores(
    q: Float[Array, "b k c r h"],
    k: Float[Array, "b k s h"],
    valid: Bool[Array | np.ndarray, "b s"] | None,
) -> Float[Array, "b k c r s"]:
    scores = _scores(q, k)
    if valid is None:
        return scores
    return jnp.where(valid[:, None, None, None], scores, MASKED)


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
