"""A paged KV cache for decoding on TPU, with Pallas' ragged paged attention kernel.

The kernel reads pages in place. On other platforms, and for arrays that `supports` excludes, the
pages of every row are gathered and XLA attends to them: portable, and the kernel's reference in
tests, but every token reads the pages twice. On a mesh, kv heads are sharded over `tensor` and rows
are whole on every device. The pool is updated in place if the caller donates it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from models.attention.target import platform

# Tokens that the kernel fetches at a time.
BLOCK = 512
# Rows that the kernel takes at a time. Each query is multiplied with the keys of all these rows.
QUERIES = 8

# Shardings of the pool [layers, pages, tokens, kv heads, head_dim], of queries, keys and values
# [rows, heads, head_dim], and of all other arrays.
_POOL = PartitionSpec(None, None, None, "tensor")
_HEADS = PartitionSpec(None, "tensor")
_WHOLE = PartitionSpec()


class PagedCache(NamedTuple):
    """One pool of pages for all layers, a page table per row, and each row's length in tokens.

        pages    [l, P, u, c, h]   P pages of u tokens in each layer; c = 2 * kv heads, in the
                                   order k0 v0 k1 v1 ...
        tables   [b, m]            numbers of a row's pages, in order
        lengths  [b]

    A row's next token takes slot `length % u` of page `tables[row, length // u]`. That page is
    written even if the row does not advance, so no other row may need what it holds. (Idle rows
    share a page that holds nothing.) Entries of `tables` after a row's pages are never used, but
    must be numbers of pages. If all pages of a row are full, nothing is written.
    """

    pages: Float[Array, "l P u c h"]
    tables: Int[Array, "b m"]
    lengths: Int[Array, " b"]

    # All layers are in one pool, so their numbers are traced and the decode loop over layers is a
    # scan. (An attribute of the class, not a field.)
    stacked = True

    def attend(
        self,
        layer: int | Int[Array, ""],
        q: Float[Array, "b n h"],
        k: Float[Array, "b k h"],
        v: Float[Array, "b k h"],
    ) -> tuple[Float[Array, "b n h"], PagedCache]:
        """Return the attention of one token per row in one layer, and the cache with its key and
        value."""
        mesh = jax.sharding.get_abstract_mesh()
        on_mesh = not (mesh.empty or mesh.are_all_axes_manual)
        devices = mesh.shape["tensor"] if on_mesh else 1
        use_kernel = platform() == "tpu" and supports(self.pages, devices)
        token = functools.partial(_attend_token, kernel=use_kernel)
        if on_mesh and k.shape[1] % devices == 0:
            specs = ((_POOL, _WHOLE, _WHOLE), _WHOLE, _HEADS, _HEADS, _HEADS)
            token = jax.shard_map(token, in_specs=specs, out_specs=(_HEADS, _POOL), check_vma=False)
        attended, pages = token((self.pages, self.tables, self.lengths), layer, q, k, v)
        return attended, self._replace(pages=pages)

    def advance(self, active: Bool[Array | np.ndarray, " b"]) -> PagedCache:
        """Keep the token in `active` rows. The next token overwrites it in the others."""
        return self._replace(lengths=self.lengths + active)


def supports(pages: Float[Array | jax.ShapeDtypeStruct, "l P u c h"], devices: int) -> bool:
    """Return whether the kernel can take this pool, with kv heads over `devices` devices.

    It needs bfloat16 or float32, heads of 128, and a number of kv heads per device that fills
    tiles: 1, 2, 4 or a multiple of 8 (in float32: 1, 2 or a multiple of 4).
    """
    c, h = pages.shape[3:]
    heads, rest = divmod(c // 2, devices)
    # 32-bit words of one token's keys and values at one index of head_dim: what a tile holds.
    words = heads * pages.dtype.itemsize // 2
    fills_tiles = words in (1, 2, 4) or words % 8 == 0
    return pages.dtype in (jnp.bfloat16, jnp.float32) and h == 128 and not rest and fills_tiles


def _attend_token(
    cache: tuple[Float[Array, "l P u c h"], Int[Array, "b m"], Int[Array, " b"]],
    layer: int | Int[Array, ""],
    q: Float[Array, "b n h"],
    k: Float[Array, "b k h"],
    v: Float[Array, "b k h"],
    *,
    kernel: bool,
) -> tuple[Float[Array, "b n h"], Float[Array, "l P u c h"]]:
    """Write keys and values on one device, then attend to them and to all earlier ones.

    The cache is given as pages, tables and lengths.
    """
    pages, tables, lengths = cache
    b, m = tables.shape
    _, count, u, c, h = pages.shape
    # A row without room looks beyond its table and gets the page number `count`. There is no such
    # page, so its write is dropped.
    page = tables.at[jnp.arange(b), lengths // u].get(mode="fill", fill_value=count)
    both = jnp.stack([k, v], axis=2).reshape(b, c, h).astype(pages.dtype)
    pages = pages.at[layer, page, lengths % u].set(both, mode="drop")
    # A layer's pages are a range of the flattened pool. Shifting the page numbers costs nothing,
    # while slicing the pool would copy it.
    pool = pages.reshape(-1, u, c, h)
    numbers = tables + layer * count
    # The new token counts too, unless the row had no room for it.
    seen = jnp.minimum(lengths + 1, m * u)
    queries = q.astype(pages.dtype)
    if kernel:
        # Query offsets of the ragged batch: one query per row.
        ends = jnp.arange(b + 1, dtype=jnp.int32)
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
