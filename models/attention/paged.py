"""Attention of one new token a row, on TPU, to pages where they lie: the ragged paged kernel of `jax.experimental.pallas`.

Owns how a token goes onto its page and what the kernel is given, and how both lie on a mesh: kv heads over `tensor`, rows whole on every
device. Anywhere else, and for what `supports` leaves out, the pages of every row are gathered and XLA attends to them: portable, and the
measure of the kernel, but each token reads the pages twice. Refuses nothing. Invariant: the pool is written in place where the
caller donates it, never copied; where a row's pages lie changes no result.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from models.attention.target import platform

BLOCK = 512  # tokens that the kernel fetches at a time
QUERIES = 8  # rows that it takes at a time; each is multiplied with the keys of all of them

_POOL, _HEADS, _WHOLE = (
    PartitionSpec(None, None, None, "tensor"),
    PartitionSpec(None, "tensor"),
    PartitionSpec(),
)


class PagedCache(NamedTuple):
    """One pool of pages for all layers, the pages of each row in order, and how many tokens a row holds.

    On the third last axis of `pages` are the tokens of a page, on the next one key, value, key, value, ... of the kv heads. A row's next
    token takes slot lengths % u of its page number lengths // u: that page has to be the row's own, and it is written whether the row
    advances or not. What a table has after a row's pages is never read; numbers have to be those of pages nonetheless.
    A row whose pages are full keeps them as they are.
    """

    pages: Float[Array, "l P u c h"]
    tables: Int[Array, "b m"]
    lengths: Int[Array, " b"]

    stacked = True  # layers are told apart by traced numbers

    def attend(
        self,
        layer: Int[Array, ""],
        q: Float[Array, "b n h"],
        k: Float[Array, "b k h"],
        v: Float[Array, "b k h"],
    ) -> tuple[Float[Array, "b n h"], PagedCache]:
        """What the token sees in this layer, itself included, and the cache with its key and value."""
        mesh = jax.sharding.get_abstract_mesh()
        cut = 1 if mesh.empty or mesh.are_all_axes_manual else mesh.shape["tensor"]
        token = functools.partial(
            _attend_token, kernel=platform() == "tpu" and supports(self.pages, cut)
        )
        if not (mesh.empty or mesh.are_all_axes_manual or k.shape[1] % cut):
            specs = (_POOL, _WHOLE, _WHOLE, _WHOLE, _HEADS, _HEADS, _HEADS)
            token = jax.shard_map(token, in_specs=specs, out_specs=(_HEADS, _POOL), check_vma=False)
        attended, pages = token(self.pages, self.tables, self.lengths, layer, q, k, v)
        return attended, self._replace(pages=pages)

    def advance(self, active: Bool[Array, " b"]) -> PagedCache:
        """After a token's last layer: rows that are `active` keep it, the others write over it next time."""
        return self._replace(lengths=self.lengths + active)


def supports(pages: Float[Array, "l P u c h"], devices: int) -> bool:
    """Whether the kernel can do the case: bfloat16 or float32, heads of 128, and a number of kv heads on each device that fills tiles.

    That is 1, 2, 4 or a multiple of 8, in float32 of 4.
    """
    c, h = pages.shape[3:]
    heads, rest = divmod(c // 2, devices)
    words = (
        heads * pages.dtype.itemsize // 2
    )  # keys and values of one token and number, in words of 32 bits
    return (
        pages.dtype in (jnp.bfloat16, jnp.float32)
        and h == 128
        and not rest
        and (words in (1, 2, 4) or words % 8 == 0)
    )


def _attend_token(
    pages: Float[Array, "l P u c h"],
    tables: Int[Array, "b m"],
    lengths: Int[Array, " b"],
    layer: Int[Array, ""],
    q: Float[Array, "b n h"],
    k: Float[Array, "b k h"],
    v: Float[Array, "b k h"],
    *,
    kernel: bool,
) -> tuple[Float[Array, "b n h"], Float[Array, "l P u c h"]]:
    """On one device: writes keys and values, then attends to them and all before."""
    (b, m), (_, count, u, c, h) = tables.shape, pages.shape
    own = tables.at[jnp.arange(b), lengths // u].get(
        mode="fill", fill_value=count
    )  # there is no page of that number
    both = jnp.stack([k, v], axis=2).reshape(b, c, h).astype(pages.dtype)
    pages = pages.at[layer, own, lengths % u].set(both, mode="drop")
    # A layer's pages are a range of the pool's: a view with other numbers, where a slice would be a copy.
    pool, numbers, seen = (
        pages.reshape(-1, u, c, h),
        tables + layer * count,
        jnp.minimum(lengths + 1, m * u),
    )
    queries = q.astype(pages.dtype)
    if kernel:
        ends = jnp.arange(b + 1, dtype=jnp.int32)  # a query a row
        out = ragged_paged_attention(
            queries,
            pool,
            seen,
            numbers,
            ends,
            ends[b:],
            sm_scale=h**-0.5,
            num_kv_pages_per_block=min(m, max(1, BLOCK // u)),
            num_queries_per_block=min(b, QUERIES),
        )
    else:
        kv = pool[numbers].reshape(b, m * u, c, h)
        out = jax.nn.dot_product_attention(
            queries[:, None],
            kv[:, :, 0::2],
            kv[:, :, 1::2],
            key_value_seq_lengths=seen,
            implementation="xla",
        )[:, 0]
    return out.astype(q.dtype), pages
