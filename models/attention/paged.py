"""A KV cache on pages: sequences of any length, and beginnings that several of them share.

A call takes new tokens of some jobs. In prefill, a job is a run of consecutive tokens of a
sequence; in decoding, the next token of a sequence, or its next token and drafts of those after it.
Every job has a table of pages, and every token of it an offset in that table:

    pages     7 [a b c d]   2 [e f g h]   9 [i . . .]      a job: table 7 2 9, tokens j k
    offsets                                   j k          j sees a .. j, and k sees a .. k

The keys and values of all new tokens are written to their pages before any of them attends. So it
does not matter how tokens are dealt to jobs and calls.

In decoding, jobs that begin alike can read their common pages together (`SharedPages`). Their
tokens attend to the shared part and to their own part apart, and the two are merged.

The pages are read in place by a kernel: Pallas on TPU (`paged_tpu`) and on GPU (`paged_triton`).
Elsewhere, and for arrays that a kernel does not support, XLA gathers some pages at a time. The work
always follows the real lengths: no length is a compiled size. On a mesh, kv heads are sharded over
`tensor`, and the rest is whole on every device. The pool is updated in place if the caller donates
it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from models.attention import paged_tpu, paged_triton
from models.attention.target import MASKED, Partial, merge, platform

# Without a kernel: tokens of a table that are gathered at a time, and queries that attend to them
# together. On a CPU, larger blocks leave its caches.
BLOCK = 64
QUERIES = 64

# Shardings of the pool, of queries, keys and values [n, heads, head_dim], and of all other arrays.
_POOL = PartitionSpec(None, None, None, "tensor")
_HEADS = PartitionSpec(None, "tensor")
_WHOLE = PartitionSpec()


class SharedPages(NamedTuple):
    """Pages that groups of jobs read together. A group has s tokens: those of the same number of
    consecutive jobs."""

    tables: Int[Array, "g m"]
    limits: Int[Array, "g s"]
    """Tokens that each token of a group sees on its pages; 0: its job has no part in them."""


class PagedCache(NamedTuple):
    """One pool of pages for all layers, and the jobs of a call. The call has j * t tokens.

    The keys of a head on a page, and its values, are neighbours: [u, h].
    """

    pages: Float[Array, "l P 2 k u h"]
    """P pages of u tokens in each layer: keys, then values, of k heads."""
    tables: Int[Array, "j m"]
    """Each job's pages, in order; behind the shared ones, if there are any. Entries after its pages
    are not used, but must be numbers of pages."""
    offsets: Int[Array, "j t"]
    """Where each token goes, counted from the beginning of the table. -1: it does not exist. Beyond
    the table nothing is written."""
    shared: SharedPages | None = None

    def attend(
        self,
        layer: int | Int[Array, ""],
        q: Float[Array, "n q h"],
        k: Float[Array, "n k h"],
        v: Float[Array, "n k h"],
    ) -> tuple[Float[Array, "n q h"], PagedCache]:
        """Write the tokens' keys and values in one layer, then attend to all that they see.

        Returns:
            The attention of every token that exists, and the cache with the tokens.
        """
        mesh = jax.sharding.get_abstract_mesh()
        on_mesh = not (mesh.empty or mesh.are_all_axes_manual)
        attend = _attend
        if on_mesh:
            # The compiler cannot shard kernels.
            cache = jax.tree.map(lambda _: _WHOLE, self)._replace(pages=_POOL)
            specs = (cache, _WHOLE, _HEADS, _HEADS, _HEADS)
            attend = jax.shard_map(
                attend, in_specs=specs, out_specs=(_HEADS, _POOL), check_vma=False
            )
        attended, pages = attend(self, jnp.asarray(layer), q, k, v)
        return attended, self._replace(pages=pages)


def _attend(
    cache: PagedCache,
    layer: Int[Array, ""],
    q: Float[Array, "n q h"],
    k: Float[Array, "n k h"],
    v: Float[Array, "n k h"],
) -> tuple[Float[Array, "n q h"], Float[Array, "l P 2 k u h"]]:
    """Attend on one device. Return the attention and the pool."""
    count, u = cache.pages.shape[1], cache.pages.shape[4]
    columns = cache.offsets // u
    exists = (cache.offsets >= 0) & (columns < cache.tables.shape[1])
    numbers = jnp.take_along_axis(cache.tables, jnp.where(exists, columns, 0), axis=1)
    # Tokens that do not exist get a page that does not exist either, and are not written.
    numbers = jnp.where(exists, numbers, count).reshape(-1)
    pages = _write(cache.pages, layer, k, v, numbers, cache.offsets.reshape(-1) % u)
    # A layer's pages are a range of the flattened pool. Shifting the page numbers costs nothing,
    # while slicing the pool would copy it.
    first = layer * count
    pool = pages.reshape(-1, *pages.shape[2:])
    queries = q.astype(pool.dtype)

    def over(tables: Int[Array, "j m"], limits: Int[Array, "j t"]) -> Partial:
        jobs = queries.reshape(*limits.shape, *q.shape[1:])
        attended = _over_pages(jobs, pool, tables, limits)
        return Partial(*(x.reshape(len(q), *x.shape[2:]) for x in attended))

    # A token sees itself.
    total = over(cache.tables + first, jnp.where(exists, cache.offsets + 1, 0))
    if cache.shared is not None:
        common = over(cache.shared.tables + first, cache.shared.limits)
        total = merge(*map(jnp.stack, zip(total, common, strict=True)))
    return total.out.astype(q.dtype), pages


def _write(
    pages: Float[Array, "l P 2 k u h"],
    layer: Int[Array, ""],
    k: Float[Array, "n k h"],
    v: Float[Array, "n k h"],
    numbers: Int[Array, " n"],
    slots: Int[Array, " n"],
) -> Float[Array, "l P 2 k u h"]:
    """Write each token to a slot of the layer's page of its number."""
    pool = pages.reshape(-1, *pages.shape[2:])
    if platform() == "tpu" and paged_tpu.supports(pool):
        count = pages.shape[1]
        numbers = jnp.where(numbers < count, layer * count + numbers, len(pool))
        return paged_tpu.write(pool, k, v, numbers, slots, interpret=False).reshape(pages.shape)
    both = jnp.stack([k, v], axis=1).astype(pages.dtype)
    # By rows of a head: otherwise the compiler for TPU copies the pool into another layout. Not to
    # the flattened pool: with one kv head, the compiler for CPU would copy that.
    kinds, heads = jnp.arange(2)[None, :, None], jnp.arange(k.shape[1])[None, None]
    numbers, slots = numbers[:, None, None], slots[:, None, None]
    return pages.at[layer, numbers, kinds, heads, slots].set(both, mode="drop")


def _over_pages(
    q: Float[Array, "j t n h"],
    pages: Float[Array, "x 2 k u h"],
    tables: Int[Array, "j m"],
    limits: Int[Array, "j t"],
) -> Partial:
    """Attend to the first `limits` tokens of each job's table, with the platform's kernel."""
    for name, kernel in (("tpu", paged_tpu), ("gpu", paged_triton)):
        if platform() == name and kernel.supports(pages):
            return kernel.attend(q, pages, tables, limits, interpret=False)
    j, t = limits.shape
    at_once = max(1, QUERIES // t)
    if j <= at_once:
        return _xla(pages, q, tables, limits)
    # A batch of jobs at a time: its work follows the longest of its own.
    batches = -(-j // at_once)
    padding = batches * at_once - j

    def batched(x: Array) -> Array:
        x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(batches, at_once, *x.shape[1:])

    one = functools.partial(_xla, pages)
    out = jax.lax.map(lambda job: one(*job), (batched(q), batched(tables), batched(limits)))
    return Partial(*(x.reshape(-1, *x.shape[2:])[:j] for x in out))


def _xla(
    pages: Float[Array, "x 2 k u h"],
    q: Float[Array, "j t n h"],
    tables: Int[Array, "j m"],
    limits: Int[Array, "j t"],
) -> Partial:
    """Attend to blocks of pages, one after the other, up to the largest limit."""
    j, t, n, h = q.shape
    x, _, k, u, _ = pages.shape
    r = n // k
    # [j, t, n, h] -> [j * k, t * r, h]: the queries of a kv head are the rows of one product.
    queries = (q * h**-0.5).reshape(j, t, k, r, h).transpose(0, 2, 1, 3, 4).reshape(j * k, t * r, h)
    block = max(1, BLOCK // u)
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % block)))
    flat = pages.reshape(2 * x, k * u * h)

    def gathered(numbers: Int[Array, "j b"]) -> Float[Array, "jk s h"]:
        """Return some pages of every job, their tokens joined."""
        kv = flat.at[numbers].get(mode="promise_in_bounds").reshape(j, block, k, u, h)
        return kv.swapaxes(1, 2).reshape(j * k, block * u, h)

    def add_block(number: Int[Array, ""], total: tuple[Array, Array, Array]):
        values, weights, before = total
        numbers = 2 * jax.lax.dynamic_slice_in_dim(tables, number * block, block, axis=1)
        offsets = number * block * u + jnp.arange(block * u)
        seen = offsets[None, None] < limits[:, :, None]
        # [j, t, s] -> [j * k, t * r, s]
        shape = (j, k, t, r, block * u)
        mask = jnp.broadcast_to(seen[:, None, :, None], shape).reshape(j * k, t * r, -1)
        scores = jnp.einsum(
            "bsh,brh->bsr", gathered(numbers), queries, preferred_element_type=jnp.float32
        )
        # With few queries, keys before queries are up to five times as fast on a CPU. Without the
        # barrier XLA would change the order back.
        scores = jax.lax.optimization_barrier(scores).swapaxes(1, 2)
        scores = jnp.where(mask, scores, MASKED)
        top = jnp.maximum(before, scores.max(-1))
        # Exact zeros: a query may see nothing of this block, or nothing at all.
        shares = jnp.where(mask, jnp.exp(scores - top[..., None]), 0)
        # What lies behind the last token may be anything, even NaN, which survives a weight of 0.
        anywhere = jnp.repeat(seen.any(1), k, axis=0)[..., None]
        v = jnp.where(anywhere, gathered(numbers + 1), 0)
        more = jnp.einsum(
            "brs,bsh->brh", shares.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        shrink = jnp.exp(before - top)
        return values * shrink[..., None] + more, weights * shrink + shares.sum(-1), top

    nothing = jnp.zeros(queries.shape, jnp.float32)
    start = (nothing, nothing[..., 0], jnp.full_like(nothing[..., 0], MASKED))
    blocks = (limits.max() + block * u - 1) // (block * u)
    values, weights, top = jax.lax.fori_loop(0, blocks, add_block, start)
    some = jnp.maximum(weights, jnp.finfo(jnp.float32).tiny)

    def by_token(x: Float[Array, "jk tr ..."]) -> Float[Array, "j t n ..."]:
        return x.reshape(j, k, t, r, *x.shape[2:]).swapaxes(1, 2).reshape(j, t, n, *x.shape[2:])

    logsumexp = jnp.where(weights > 0, top + jnp.log(some), MASKED)
    return Partial(by_token(values / some[..., None]), by_token(logsumexp))
