"""Attention in plain XLA, for any device: sequences in chunks of queries.

Owns the portable arithmetic. Softmax is in float32, and the backward pass computes the scores again
from the log-sum-exp (as FlashAttention does): on CPU, saving and loading them costs several times
what computing them does. Both passes hold the scores of one chunk at a time. Refuses nothing.
Invariant: the result does not depend on the query chunk, and a shared prefix equals the same tokens
in every row.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from models.attention.target import SAVED

SPANS = 8  # loops over chunks that causal attention is compiled to
MASKED = -1e30  # finite, so that a row without any key gives numbers and not NaN


class _Keys(NamedTuple):
    """What the queries look at, heads before positions: their own rows' keys and values, and a prefix that g = b / p rows share."""

    k: Float[Array, "b k t h"]
    v: Float[Array, "b k t h"]
    prefix_k: Float[Array, "p k s h"] | None
    prefix_v: Float[Array, "p k s h"] | None


class _Masks(NamedTuple):
    """Where keys may be seen: equal segments (None: everywhere), valid prefix positions (None: all)."""

    segments: Int[Array, "b t"] | None
    prefix: Bool[Array, "p s"] | None


class _Partial(NamedTuple):
    """Attention over some of the keys: sum of weighted values, sum of weights, and the score both are relative to."""

    values: Float[Array, "b k t r h"]
    weights: Float[Array, "b k t r"]
    top: Float[Array, "b k t r"]


def attend(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    *,
    causal: bool,
    segment_ids: Int[Array, "b t"] | None,
    prefix: tuple[Float[Array, "p s k h"], Float[Array, "p s k h"]] | None,
    prefix_mask: Bool[Array, "p s"] | None,
    chunk: int,
) -> Float[Array, "b t n h"]:
    """`attention.attend` in chunks of `chunk` queries.

    A chunk looks at the prefix and at the keys up to the end of its loop.
    """
    b, t, n, h = q.shape
    kv = k.shape[2]
    # Heads before positions, and a kv head's queries side by side: one plain matmul a (row, kv head).
    queries = (q * h**-0.5).reshape(b, t, kv, n // kv, h).transpose(0, 2, 1, 3, 4)
    shared = (
        (None, None)
        if prefix is None
        else (prefix[0].transpose(0, 2, 1, 3), prefix[1].transpose(0, 2, 1, 3))
    )
    keys = _Keys(k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), *shared)
    out: Any = _attend(queries, keys, _Masks(segment_ids, prefix_mask), causal, chunk)
    return out.transpose(0, 2, 1, 3, 4).reshape(b, t, n, h)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(
    q: Float[Array, "b k t r h"], keys: _Keys, masks: _Masks, causal: bool, chunk: int
) -> Float[Array, "b k t r h"]:
    return _forward(q, keys, masks, causal, chunk)[0]


def _forward(q: Float[Array, "b k t r h"], keys: _Keys, masks: _Masks, causal: bool, chunk: int):
    def step(done, start, span: _Span):
        part = _cut(q, start, span.size)
        scores = _own_scores(part, keys.k[:, :, : span.end], masks.segments, causal, start)
        found = _weigh(scores, keys.v[:, :, : span.end])
        if keys.prefix_k is not None and keys.prefix_v is not None:
            scores = _prefix_scores(_fold(part, keys.prefix_k), keys.prefix_k, masks.prefix)
            shared = _weigh(scores, keys.prefix_v)
            found = _merge(found, _Partial(*(_unfold(x, part) for x in shared)))
        out = (found.values / found.weights[..., None]).astype(q.dtype)
        logsumexp = found.top + jnp.log(found.weights)
        return _put(done[0], out, start), _put(done[1], logsumexp, start)

    empty = jnp.zeros(q.shape, q.dtype), jnp.zeros(q.shape[:-1], jnp.float32)
    out, logsumexp = _over_chunks(step, empty, q.shape[2], causal, chunk)
    out = checkpoint_name(out, SAVED)
    return out, (q, keys, masks, out, checkpoint_name(logsumexp, SAVED))


def _backward(causal: bool, chunk: int, saved, d_out: Float[Array, "b k t r h"]):
    q, keys, masks, out, logsumexp = saved
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def step(done, start, span: _Span):
        d_q, d_keys = done
        parts = [_cut(x, start, span.size) for x in (q, logsumexp, d_out, delta)]
        k, v = keys.k[:, :, : span.end], keys.v[:, :, : span.end]
        scores = _own_scores(parts[0], k, masks.segments, causal, start)
        d_part, d_k, d_v = _grads(parts[0], k, v, scores, *parts[1:])
        d_k = _put(d_keys.k, d_keys.k[:, :, : span.end] + d_k, 0)
        d_v = _put(d_keys.v, d_keys.v[:, :, : span.end] + d_v, 0)
        d_prefix = (None, None)
        if keys.prefix_k is not None:
            folded = [_fold(x, keys.prefix_k) for x in parts]
            scores = _prefix_scores(folded[0], keys.prefix_k, masks.prefix)
            more, *d_prefix = _grads(folded[0], keys.prefix_k, keys.prefix_v, scores, *folded[1:])
            d_part = d_part + _unfold(more, parts[0])
            d_prefix = [d_keys.prefix_k + d_prefix[0], d_keys.prefix_v + d_prefix[1]]
        return _put(d_q, d_part.astype(q.dtype), start), _Keys(d_k, d_v, *d_prefix)

    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), keys)
    empty = jnp.zeros(q.shape, q.dtype), sums
    d_q, d_keys = _over_chunks(step, empty, q.shape[2], causal, chunk)
    return d_q, jax.tree.map(lambda d, x: d.astype(x.dtype), d_keys, keys), None


_attend.defvjp(_forward, _backward)


class _Span(NamedTuple):
    """`count` chunks of `size` queries from query `start` on.

    None of them may see a key at `end` or later.
    """

    start: int
    count: int
    size: int
    end: int


def _spans(t: int, causal: bool, chunk: int) -> list[_Span]:
    """The chunks of t queries, grouped into loops. A shorter last chunk stands alone.

    Every pass of a loop needs the same number of keys. With causality a chunk sees more keys than
    the one before it, so the chunks are divided among at most `SPANS` loops: the program does not
    grow with t, and the keys beyond the causal frontier cost about t^2 / (2 SPANS) scores.
    """
    whole, rest = divmod(t, chunk)
    together = max(1, -(-whole // SPANS) if causal else whole)
    spans = []
    for first in range(0, whole, together):
        after = min(first + together, whole)
        spans.append(_Span(first * chunk, after - first, chunk, after * chunk if causal else t))
    if rest:
        spans.append(_Span(whole * chunk, 1, rest, t))
    return spans


def _over_chunks(step, done, t: int, causal: bool, chunk: int):
    """`done = step(done, first query, span)` for every chunk.

    A loop holds one chunk's scores at a time. XLA on CPU may hold those of all unrolled chunks.
    """
    for span in _spans(t, causal, chunk):
        if span.count == 1:
            done = step(done, span.start, span)
        else:
            starts = span.start + span.size * jnp.arange(span.count)
            done = jax.lax.scan(_without_output(step, span), done, starts)[0]
    return done


def _without_output(step, span: _Span):
    """`step` as the body of a scan."""
    return lambda done, start: (step(done, start, span), None)


def _cut(
    x: Float[Array, "b k t ..."],
    start: int | Int[Array, ""],
    size: int,
) -> Float[Array, "b k c ..."]:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=2)


def _put(
    x: Float[Array, "b k t ..."],
    part: Float[Array, "b k c ..."],
    start: int | Int[Array, ""],
) -> Float[Array, "b k t ..."]:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=2)


def _own_scores(
    q: Float[Array, "b k c r h"],
    k: Float[Array, "b k s h"],
    segments: Int[Array, "b t"] | None,
    causal: bool,
    start: int | Int[Array, ""],
) -> Float[Array, "b k c r s"]:
    """Scores of queries from position `start` on against their own row's first keys, -1e30 where these may not be seen."""
    c, s = q.shape[2], k.shape[2]
    scores = _scores(q, k)
    if causal:
        earlier = start + jnp.arange(c)[:, None] >= jnp.arange(s)
        scores = jnp.where(earlier[:, None], scores, MASKED)
    if segments is not None:
        own = jax.lax.dynamic_slice_in_dim(segments, start, c, axis=1)
        same = own[:, :, None] == segments[:, None, :s]
        scores = jnp.where(same[:, None, :, None], scores, MASKED)
    return scores


def _prefix_scores(
    q: Float[Array, "p k c r h"], k: Float[Array, "p k s h"], valid: Bool[Array, "p s"] | None
) -> Float[Array, "p k c r s"]:
    scores = _scores(q, k)
    return scores if valid is None else jnp.where(valid[:, None, None, None], scores, MASKED)


def _weigh(scores: Float[Array, "b k c r s"], v: Float[Array, "b k s h"]) -> _Partial:
    top = jnp.max(scores, axis=-1)
    weights = jnp.exp(scores - top[..., None])
    return _Partial(_apply(weights.astype(v.dtype), v), jnp.sum(weights, axis=-1), top)


def _merge(a: _Partial, b: _Partial) -> _Partial:
    """Attention over the keys of both."""
    top = jnp.maximum(a.top, b.top)
    x, y = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return _Partial(
        a.values * x[..., None] + b.values * y[..., None], a.weights * x + b.weights * y, top
    )


def _grads(q, k, v, scores, logsumexp, d_out, delta):
    """Gradients of queries, keys and values through one set of scores, float32."""
    weights = jnp.exp(scores - logsumexp[..., None])
    d_v = _collect(weights.astype(d_out.dtype), d_out)
    d_scores = (weights * (_scores(d_out, v) - delta[..., None])).astype(q.dtype)
    return _apply(d_scores, k), _collect(d_scores, q), d_v


def _fold(x: Array, prefix: Array) -> Array:
    """[b k t ...] -> [p k g*t ...]: the g rows of a prompt become more queries of the same keys."""
    p = prefix.shape[0]
    b, k, t, *rest = x.shape
    return x.reshape(p, b // p, k, t, *rest).swapaxes(1, 2).reshape(p, k, b // p * t, *rest)


def _unfold(x: Array, q: Array) -> Array:
    """The way back from `_fold`, to q's rows and positions."""
    p, k, rest = x.shape[0], x.shape[1], x.shape[3:]
    return (
        x.reshape(p, k, q.shape[0] // p, q.shape[2], *rest)
        .swapaxes(1, 2)
        .reshape(*q.shape[:3], *rest)
    )


# One batch axis in every matmul: XLA on CPU runs more of them several times slower.


def _scores(q: Float[Array, "b k c r h"], k: Float[Array, "b k s h"]) -> Float[Array, "b k c r s"]:
    b, n, c, r, h = q.shape
    return _matmul(q.reshape(b * n, c * r, h), k.reshape(b * n, -1, h), 2, 2).reshape(
        b, n, c, r, -1
    )


def _apply(
    weights: Float[Array, "b k c r s"], v: Float[Array, "b k s h"]
) -> Float[Array, "b k c r h"]:
    b, n, c, r, s = weights.shape
    return _matmul(weights.reshape(b * n, c * r, s), v.reshape(b * n, s, -1), 2, 1).reshape(
        b, n, c, r, -1
    )


def _collect(
    weights: Float[Array, "b k c r s"], x: Float[Array, "b k c r h"]
) -> Float[Array, "b k s h"]:
    """What each key gets from all queries."""
    b, n, c, r, s = weights.shape
    return _matmul(weights.reshape(b * n, c * r, s), x.reshape(b * n, c * r, -1), 1, 1).reshape(
        b, n, s, -1
    )


def _matmul(
    a: Float[Array, "x i j"], b: Float[Array, "x u w"], contract_a: int, contract_b: int
) -> Float[Array, "x y z"]:
    return jax.lax.dot_general(
        a, b, (((contract_a,), (contract_b,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
