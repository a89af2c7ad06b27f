"""A KV cache for decoding on any device: arrays per row, and prompts that several rows share.

A cache (`DenseCache` here, `paged.PagedCache` for TPU) has two methods: `attend` takes one token
per row through one layer and writes its key and value; `advance`, after the last layer, decides
which rows keep the token. A row that does not advance keeps what it had.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.attention.target import MASKED

LayersKV = tuple[Float[Array, "l b s k h"], Float[Array, "l b s k h"]]


class Shared(NamedTuple):
    """Keys and values of p prompts. Each is stored once and read by g = b / p rows.

    One array per layer, laid out as in `DenseCache`. `valid` says which of the u columns each of
    the b rows sees.
    """

    k: tuple[Float[Array, "kp h u"], ...]
    v: tuple[Float[Array, "kp u h"], ...]
    valid: Bool[Array, "b u"]

    @classmethod
    def of(
        cls,
        kv: tuple[Float[Array, "l p u k h"], Float[Array, "l p u k h"]],
        valid: Bool[Array, "b u"],
    ) -> Shared:
        """Make a cache from the keys and values of a forward pass over the prompts."""
        return cls(*_flat(kv), valid)


class DenseCache(NamedTuple):
    """Keys and values of each row, with one column per token.

                0  1  2  3  4  5  ...  s - 1
        row 0   #  #  .  #                      # valid, . a token that the row did not keep
        row 1   #  .  #  #
                            ^ `column`: where the next token of every row goes

    Keys are [k * b, h, s] and values [k * b, s, h], one array per layer. Entry j * b + i is kv head
    j of row i. With other layouts, XLA on CPU makes copies for every token:

    - With two batch axes, or axes in another order than the product needs, it copies the whole
      cache four times.
    - With all layers in one array, it copies each layer's slice.
    - With positions not last in keys, it transposes them, which takes up to seven times as long as
      the product.
    """

    k: tuple[Float[Array, "kb h s"], ...]
    v: tuple[Float[Array, "kb s h"], ...]
    valid: Bool[Array, "b s"]
    column: Int[Array, ""]
    shared: Shared | None = None

    # Each layer has its own arrays, so layers are numbered by Python ints and the decode loop over
    # layers is unrolled. (An attribute of the class, not a field.)
    stacked = False

    @classmethod
    def prefilled(cls, kv: LayersKV, valid: Bool[Array, "b s"], room: int) -> DenseCache:
        """Make a cache from the keys and values of a forward pass, with `room` free columns.

        Invalid entries are zeroed: a NaN would survive a zero attention weight.
        """
        mask = valid[..., None, None]
        k, v = _flat((jnp.where(mask, kv[0], 0), jnp.where(mask, kv[1], 0)))
        k = tuple(jnp.pad(x, ((0, 0), (0, 0), (0, room))) for x in k)
        v = tuple(jnp.pad(x, ((0, 0), (0, room), (0, 0))) for x in v)
        return cls(k, v, jnp.pad(valid, ((0, 0), (0, room))), jnp.int32(valid.shape[1]))

    def since(self, column: int) -> LayersKV:
        """Return keys and values from `column` on, in the layout of a forward pass."""
        b = len(self.valid)

        # [k * b, h, s] and [k * b, s, h] -> [b, s, k, h]
        def keys(x: Float[Array, "kb h s"]) -> Float[Array, "b u k h"]:
            x = x[:, :, column:]
            return x.reshape(-1, b, *x.shape[1:]).transpose(1, 3, 0, 2)

        def values(x: Float[Array, "kb s h"]) -> Float[Array, "b u k h"]:
            x = x[:, column:]
            return x.reshape(-1, b, *x.shape[1:]).transpose(1, 2, 0, 3)

        return jnp.stack([keys(x) for x in self.k]), jnp.stack([values(x) for x in self.v])

    def attend(
        self,
        layer: int,
        q: Float[Array, "b n h"],
        k: Float[Array, "b k h"],
        v: Float[Array, "b k h"],
    ) -> tuple[Float[Array, "b n h"], DenseCache]:
        """Return the attention of one token per row in one layer, and the cache with its key and
        value."""
        b, n, h = q.shape
        heads = k.shape[1]
        layer_k, layer_v = self._written(layer, k, v)
        # [b, n, h] -> [k * b, r, h], in the order of the cache's entries.
        queries = (q * h**-0.5).reshape(b, heads, -1, h).swapaxes(0, 1).reshape(heads * b, -1, h)
        columns = jnp.arange(layer_k.shape[-1])[None, :]
        values, weights, top = _weigh(
            queries, layer_k, layer_v, self.valid | (columns == self.column)
        )
        if self.shared is not None:
            more_values, more_weights, more_top = _weigh(
                queries, self.shared.k[layer], self.shared.v[layer], self.shared.valid
            )
            # The two parts are relative to their own largest scores (see `xla._Partial`).
            largest = jnp.maximum(top, more_top)
            scale = jnp.exp(top - largest)
            more_scale = jnp.exp(more_top - largest)
            values = values * scale[..., None] + more_values * more_scale[..., None]
            weights = weights * scale + more_weights * more_scale
        attended = (values / weights[..., None]).astype(q.dtype)
        attended = attended.reshape(heads, b, -1, h).swapaxes(0, 1).reshape(b, n, h)
        cache = self._replace(
            k=_with(self.k, layer, layer_k),
            v=_with(self.v, layer, layer_v),
        )
        return attended, cache

    def _written(
        self, layer: int, k: Float[Array, "b k h"], v: Float[Array, "b k h"]
    ) -> tuple[Float[Array, "kb h s"], Float[Array, "kb s h"]]:
        """Return a layer's keys and values with those of a token in the current column."""
        h = k.shape[-1]
        layer_k = self.k[layer]
        layer_v = self.v[layer]
        new_k = k.swapaxes(0, 1).reshape(-1, h, 1).astype(layer_k.dtype)
        new_v = v.swapaxes(0, 1).reshape(-1, 1, h).astype(layer_v.dtype)
        return (
            jax.lax.dynamic_update_slice(layer_k, new_k, (0, 0, self.column)),
            jax.lax.dynamic_update_slice(layer_v, new_v, (0, self.column, 0)),
        )

    def advance(self, active: Bool[Array, " b"]) -> DenseCache:
        """Move on to the next column. Only `active` rows keep the token in the current one."""
        valid = self.valid.at[:, self.column].set(active)
        return self._replace(valid=valid, column=self.column + 1)


def _weigh(
    q: Float[Array, "kb r h"],
    k: Float[Array, "kp h s"],
    v: Float[Array, "kp s h"],
    seen: Bool[Array, "b s"],
) -> tuple[Float[Array, "kb r h"], Float[Array, "kb r"], Float[Array, "kb r"]]:
    """Return weighted values, sum of weights and largest score of every query, float32.

    Rows may share keys and values: then kp < kb.
    """
    kb, r, h = q.shape
    b, s = seen.shape
    # Rows that share keys become more queries of the same keys, [kp, g * r, h]. Decoding is bound
    # by reading the cache, and this reads shared keys once.
    folded = q.reshape(len(k), -1, h)
    dimensions = (((2,), (1,)), ((0,), (0,)))
    scores = jax.lax.dot_general(folded, k, dimensions, preferred_element_type=jnp.float32)
    mask = jnp.broadcast_to(seen[None, :, None], (kb // b, b, r, s)).reshape(scores.shape)
    scores = jnp.where(mask, scores, MASKED)
    top = scores.max(-1)
    weights = jnp.exp(scores - top[..., None])
    values = jax.lax.dot_general(
        weights.astype(v.dtype), v, dimensions, preferred_element_type=jnp.float32
    )
    return values.reshape(kb, r, h), weights.sum(-1).reshape(kb, r), top.reshape(kb, r)


def _flat(
    kv: LayersKV,
) -> tuple[tuple[Float[Array, "kb h s"], ...], tuple[Float[Array, "kb s h"], ...]]:
    """Reshape [l, b, s, k, h] to, per layer, keys [k * b, h, s] and values [k * b, s, h]."""
    layers, b, s, k, h = kv[0].shape
    keys = kv[0].transpose(0, 3, 1, 4, 2).reshape(layers, k * b, h, s)
    values = kv[1].transpose(0, 3, 1, 2, 4).reshape(layers, k * b, s, h)
    return tuple(keys), tuple(values)


def _with(arrays: tuple[Array, ...], number: int, array: Array) -> tuple[Array, ...]:
    return (*arrays[:number], array, *arrays[number + 1 :])
