"""Attention of one new token a row, to keys and values in flight: caches that a decode loop carries.

Owns how keys and values lie while tokens are decoded. `DenseCache` is for any device: arrays of a row each, and prompts that
several rows read in one copy. (`paged.PagedCache` is for TPU: it reads pages where they lie.) Either has `attend`, which takes a
token's query, key and value in one layer, and `advance`, after the last layer. Invariant: a row that does not advance keeps what it held.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.attention.xla import MASKED

KV = tuple[Float[Array, "l b s k h"], Float[Array, "l b s k h"]]


class Shared(NamedTuple):
    """Keys and values that g = b / p rows read in one copy, one array a layer (as in `DenseCache`), and which of them each row sees."""

    k: tuple[Float[Array, "kp h u"], ...]
    v: tuple[Float[Array, "kp u h"], ...]
    valid: Bool[Array, "b u"]

    @classmethod
    def of(
        cls,
        kv: tuple[Float[Array, "l p u k h"], Float[Array, "l p u k h"]],
        valid: Bool[Array, "b u"],
    ) -> Shared:
        """What a forward pass left of p prompts."""
        return cls(*_flat(kv), valid)


class DenseCache(NamedTuple):
    """A row's own keys and values, one array a layer, those it sees, and the column that every row's next token takes.

    Head j of row i is entry j * b + i. All of this is what XLA on CPU runs fast: a product with two batch axes, or arrays of another shape
    than the products want, make it copy the whole cache for every token, four times; a layer's slice of one array is a copy, too;
    and where keys do not have positions last, turning them around takes up to seven times as long as the product.
    """

    k: tuple[Float[Array, "kb h s"], ...]
    v: tuple[Float[Array, "kb s h"], ...]
    valid: Bool[Array, "b s"]
    column: Int[Array, ""]
    shared: Shared | None = None

    stacked = False  # layers are told apart by Python numbers

    @classmethod
    def prefilled(cls, kv: KV, valid: Bool[Array, "b s"], room: int) -> DenseCache:
        """What a forward pass left, with `room` columns more. What is not valid may be anything, and becomes 0: no weight mends a NaN."""
        k, v = _flat(
            (
                jnp.where(valid[..., None, None], kv[0], 0),
                jnp.where(valid[..., None, None], kv[1], 0),
            )
        )
        k = tuple(jnp.pad(x, ((0, 0), (0, 0), (0, room))) for x in k)
        v = tuple(jnp.pad(x, ((0, 0), (0, room), (0, 0))) for x in v)
        return cls(k, v, jnp.pad(valid, ((0, 0), (0, room))), jnp.int32(valid.shape[1]))

    def since(self, column: int) -> KV:
        """Keys and values from a column on, as a forward pass leaves them."""
        b = len(self.valid)
        k = jnp.stack(
            [
                x[:, :, column:].reshape(-1, b, *x[:, :, column:].shape[1:]).transpose(1, 3, 0, 2)
                for x in self.k
            ]
        )
        v = jnp.stack(
            [
                x[:, column:].reshape(-1, b, *x[:, column:].shape[1:]).transpose(1, 2, 0, 3)
                for x in self.v
            ]
        )
        return k, v

    def attend(
        self,
        layer: int,
        q: Float[Array, "b n h"],
        k: Float[Array, "b k h"],
        v: Float[Array, "b k h"],
    ) -> tuple[Float[Array, "b n h"], DenseCache]:
        """What the token sees in this layer, itself included, and the cache with its key and value."""
        b, n, h = q.shape
        heads = k.shape[1]
        own_k, own_v = self.k[layer], self.v[layer]
        own_k = jax.lax.dynamic_update_slice(
            own_k, k.swapaxes(0, 1).reshape(-1, h, 1).astype(own_k.dtype), (0, 0, self.column)
        )
        own_v = jax.lax.dynamic_update_slice(
            own_v, v.swapaxes(0, 1).reshape(-1, 1, h).astype(own_v.dtype), (0, self.column, 0)
        )
        queries = (q * h**-0.5).reshape(b, heads, -1, h).swapaxes(0, 1).reshape(heads * b, -1, h)
        seen = self.valid | (jnp.arange(own_k.shape[-1]) == self.column)
        values, weights, top = _weigh(queries, own_k, own_v, seen)
        if self.shared is not None:
            # The rows of a prompt as more queries of the same keys: what decoding costs is what it reads.
            more_values, more_weights, more_top = _weigh(
                queries, self.shared.k[layer], self.shared.v[layer], self.shared.valid
            )
            largest = jnp.maximum(top, more_top)
            x, y = jnp.exp(top - largest), jnp.exp(more_top - largest)
            values, weights = (
                values * x[..., None] + more_values * y[..., None],
                weights * x + more_weights * y,
            )
        attended = (
            (values / weights[..., None])
            .astype(q.dtype)
            .reshape(heads, b, -1, h)
            .swapaxes(0, 1)
            .reshape(b, n, h)
        )
        return attended, self._replace(k=_with(self.k, layer, own_k), v=_with(self.v, layer, own_v))

    def advance(self, active: Bool[Array, " b"]) -> DenseCache:
        """After a token's last layer: rows that are `active` keep it."""
        return self._replace(
            valid=self.valid.at[:, self.column].set(active), column=self.column + 1
        )


def _weigh(
    q: Float[Array, "kb r h"],
    k: Float[Array, "x h s"],
    v: Float[Array, "x s h"],
    seen: Bool[Array, "b s"],
) -> tuple[Float[Array, "kb r h"], Float[Array, "kb r"], Float[Array, "kb r"]]:
    """Weighted values, sum of weights and largest score of every query, float32. Where x is less than kb, rows share keys and values."""
    kb, r, h = q.shape
    folded = q.reshape(len(k), -1, h)
    scores = jax.lax.dot_general(
        folded, k, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
    mask = jnp.broadcast_to(
        seen[None, :, None], (kb // len(seen), len(seen), r, seen.shape[1])
    ).reshape(scores.shape)
    scores = jnp.where(mask, scores, MASKED)
    top = scores.max(-1)
    weights = jnp.exp(scores - top[..., None])
    values = jax.lax.dot_general(
        weights.astype(v.dtype), v, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
    return values.reshape(kb, r, h), weights.sum(-1).reshape(kb, r), top.reshape(kb, r)


def _flat(kv: KV) -> tuple[tuple[Float[Array, "kb h s"], ...], tuple[Float[Array, "kb s h"], ...]]:
    """One array a layer, heads before rows; positions last in keys."""
    layers, b, s, k, h = kv[0].shape
    keys, values = kv[0].transpose(0, 3, 1, 4, 2), kv[1].transpose(0, 3, 1, 2, 4)
    return tuple(keys.reshape(layers, k * b, h, s)), tuple(values.reshape(layers, k * b, s, h))


def _with(arrays: tuple[Array, ...], number: int, array: Array) -> tuple[Array, ...]:
    return (*arrays[:number], array, *arrays[number + 1 :])
