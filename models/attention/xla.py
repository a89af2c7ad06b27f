"""Attention in plain XLA, for any device: sequences in chunks of queries.

Owns the portable arithmetic. Softmax is in float32, and the backward pass computes the scores again from the log-sum-exp (as
FlashAttention does): on CPU, saving and loading them costs several times what computing them does. Refuses nothing. Invariant: the
result does not depend on the query chunk, and a shared prefix equals the same tokens in every row.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from models.attention.target import SAVED

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
    """`attention.attend` in chunks of `chunk` queries, each against the keys up to its end.

    That is half the work of T^2, and in memory the scores of a chunk at a time; those against a prefix come whole.
    """
    b, t, n, h = q.shape
    kv = k.shape[2]
    # Heads before positions, and a kv head's queries side by side: one plain matmul a (row, kv head).
    queries = (q * h**-0.5).reshape(b, t, kv, n // kv, h).transpose(0, 2, 1, 3, 4)
    shared = (None, None) if prefix is None else (prefix[0].transpose(0, 2, 1, 3), prefix[1].transpose(0, 2, 1, 3))
    keys = _Keys(k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), *shared)
    out: Any = _attend(queries, keys, _Masks(segment_ids, prefix_mask), causal, chunk)
    return out.transpose(0, 2, 1, 3, 4).reshape(b, t, n, h)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(q: Float[Array, "b k t r h"], keys: _Keys, masks: _Masks, causal: bool, chunk: int) -> Float[Array, "b k t r h"]:
    return _forward(q, keys, masks, causal, chunk)[0]


def _forward(q: Float[Array, "b k t r h"], keys: _Keys, masks: _Masks, causal: bool, chunk: int):
    parts = []
    for start, stop, end in _chunks(q.shape[2], causal, chunk):
        scores = _own_scores(q[:, :, start:stop], keys.k[:, :, :end], masks.segments, causal, start)
        parts.append(_weigh(scores, keys.v[:, :, :end]))
    whole = _Partial(*(jnp.concatenate(part, axis=2) for part in zip(*parts, strict=True)))
    if keys.prefix_k is not None and keys.prefix_v is not None:
        shared = _weigh(_prefix_scores(_fold(q, keys.prefix_k), keys.prefix_k, masks.prefix), keys.prefix_v)
        whole = _merge(whole, _Partial(*(_unfold(x, q) for x in shared)))
    out = checkpoint_name((whole.values / whole.weights[..., None]).astype(q.dtype), SAVED)
    return out, (q, keys, masks, out, checkpoint_name(whole.top + jnp.log(whole.weights), SAVED))


def _backward(causal: bool, chunk: int, saved, d_out: Float[Array, "b k t r h"]):
    q, keys, masks, out, logsumexp = saved
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    d_q, d_k, d_v = [], jnp.zeros(keys.k.shape, jnp.float32), jnp.zeros(keys.v.shape, jnp.float32)
    for start, stop, end in _chunks(q.shape[2], causal, chunk):
        part = slice(start, stop)
        scores = _own_scores(q[:, :, part], keys.k[:, :, :end], masks.segments, causal, start)
        grads = _grads(q[:, :, part], keys.k[:, :, :end], keys.v[:, :, :end], scores, *(x[:, :, part] for x in (logsumexp, d_out, delta)))
        d_q.append(grads[0])
        d_k, d_v = d_k.at[:, :, :end].add(grads[1]), d_v.at[:, :, :end].add(grads[2])
    d_q = jnp.concatenate(d_q, axis=2)
    d_prefix = (None, None)
    if keys.prefix_k is not None:
        folded = [_fold(x, keys.prefix_k) for x in (q, logsumexp, d_out, delta)]
        scores = _prefix_scores(folded[0], keys.prefix_k, masks.prefix)
        more, *d_prefix = _grads(folded[0], keys.prefix_k, keys.prefix_v, scores, *folded[1:])
        d_q = d_q + _unfold(more, q)
        d_prefix = [d.astype(keys.k.dtype) for d in d_prefix]
    return d_q.astype(q.dtype), _Keys(d_k.astype(keys.k.dtype), d_v.astype(keys.v.dtype), *d_prefix), None


_attend.defvjp(_forward, _backward)


def _chunks(t: int, causal: bool, chunk: int) -> list[tuple[int, int, int]]:
    """(first query, query after the last, keys that any of them may see) of each chunk."""
    return [(start, min(start + chunk, t), min(start + chunk, t) if causal else t) for start in range(0, t, chunk)]


def _own_scores(
    q: Float[Array, "b k c r h"], k: Float[Array, "b k s h"], segments: Int[Array, "b t"] | None, causal: bool, start: int
) -> Float[Array, "b k c r s"]:
    """Scores of queries from position `start` on against their own row's first keys, -1e30 where these may not be seen."""
    c, s = q.shape[2], k.shape[2]
    scores = _scores(q, k)
    if causal:
        scores = jnp.where((jnp.arange(start, start + c)[:, None] >= jnp.arange(s))[:, None], scores, MASKED)
    if segments is not None:
        same = segments[:, start : start + c, None] == segments[:, None, :s]
        scores = jnp.where(same[:, None, :, None], scores, MASKED)
    return scores


def _prefix_scores(q: Float[Array, "p k c r h"], k: Float[Array, "p k s h"], valid: Bool[Array, "p s"] | None) -> Float[Array, "p k c r s"]:
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
    return _Partial(a.values * x[..., None] + b.values * y[..., None], a.weights * x + b.weights * y, top)


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
    return x.reshape(p, k, q.shape[0] // p, q.shape[2], *rest).swapaxes(1, 2).reshape(*q.shape[:3], *rest)


# One batch axis in every matmul: XLA on CPU runs more of them several times slower.


def _scores(q: Float[Array, "b k c r h"], k: Float[Array, "b k s h"]) -> Float[Array, "b k c r s"]:
    b, n, c, r, h = q.shape
    return _matmul(q.reshape(b * n, c * r, h), k.reshape(b * n, -1, h), 2, 2).reshape(b, n, c, r, -1)


def _apply(weights: Float[Array, "b k c r s"], v: Float[Array, "b k s h"]) -> Float[Array, "b k c r h"]:
    b, n, c, r, s = weights.shape
    return _matmul(weights.reshape(b * n, c * r, s), v.reshape(b * n, s, -1), 2, 1).reshape(b, n, c, r, -1)


def _collect(weights: Float[Array, "b k c r s"], x: Float[Array, "b k c r h"]) -> Float[Array, "b k s h"]:
    """What each key gets from all queries."""
    b, n, c, r, s = weights.shape
    return _matmul(weights.reshape(b * n, c * r, s), x.reshape(b * n, c * r, -1), 1, 1).reshape(b, n, s, -1)


def _matmul(a: Float[Array, "x i j"], b: Float[Array, "x u w"], contract_a: int, contract_b: int) -> Float[Array, "x y z"]:
    return jax.lax.dot_general(a, b, (((contract_a,), (contract_b,)), ((0,), (0,))), preferred_element_type=jnp.float32)
