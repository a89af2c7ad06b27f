"""Attention over pages on GPU: a flash kernel in Triton that reads the pages in place.

A program owns one tile of rows, and takes a share of the keys that these rows see. Decoding has few
queries and many keys, so it needs several programs per job to keep the memory busy. Each writes a
part, and XLA merges the parts by log-sum-exp. The number of programs depends on shapes alone, so
the result of a job does not depend on other jobs. Softmax and sums are in float32, with powers
of 2.

Shapes: j jobs of t queries; n query heads, k kv heads; r rows of a kv head, which are the query
heads that use it, query by query; h head_dim; pages of u tokens, m in a table; s shares of the
keys. The kernel must run in a shard_map over several devices.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from models.attention.target import MASKED, Partial, merge

# Keys that a program takes at a time. A page may be smaller or larger.
BLOCK = 64
# Rows of a tile, a power of 2: tensor cores need 16, and more than 64 would not fit into registers.
MIN_TILE, MAX_TILE = 16, 64
# Programs that keep a GPU busy: two on each of the 132 multiprocessors of an H200.
PROGRAMS = 264
# Most keys of a program, if its job has one tile. Shapes do not tell how many jobs see any key: at
# the end of a rollout few do, and only their own programs work.
SPAN = 2048
# Page numbers are loaded before the keys, which takes stages of its own. With fewer than 5, Triton
# makes one buffer for keys (compiled for sm_90), so a program would wait for every step's keys.
STAGES = 5
LOG2_E = math.log2(math.e)


def supports(pages: Float[Array | jax.ShapeDtypeStruct, "x 2 k u h"]) -> bool:
    """Return whether the kernel can take these pages and queries of their type, which needs 16
    bits, and heads of a power of two."""
    return pages.dtype in (jnp.bfloat16, jnp.float16) and pages.shape[4] in (16, 32, 64, 128)


def attend(
    q: Float[Array, "j t n h"],
    pages: Float[Array, "x 2 k u h"],
    tables: Int[Array, "j m"],
    limits: Int[Array, "j t"],
    interpret: bool,
) -> Partial:
    """Attend to the first tokens on the pages of each job, as many as the limit of a query says.

    Args:
        q: Queries. Query head i uses kv head i // (n / k).
        pages: Keys and values of all pages.
        tables: Numbers of each job's pages, in order.
        limits: How many tokens each query sees, counted from the beginning of its job's table.
        interpret: Whether to run without a GPU.
    """
    (j, t, n, h), (k, u) = q.shape, pages.shape[2:4]
    sharing = n // k
    used = t * sharing
    tile = min(max(pl.next_power_of_2(used), MIN_TILE), MAX_TILE)
    # Rows that fill up the last tile see nothing.
    fill = (0, -used % tile)
    row_limits = jnp.pad(jnp.repeat(limits, sharing, axis=1), ((0, 0), fill))
    rows = q.reshape(j, t, k, sharing, h).swapaxes(1, 2).reshape(j, k, used, h)
    rows = jnp.pad(rows, ((0, 0), (0, 0), fill, (0, 0)))
    tiles = rows.shape[2] // tile
    shares = _shares(j * k, tiles, tables.shape[1] * u)
    parts = pl.pallas_call(
        _kernel,
        # The first axis is the fastest, so programs that read the same keys run together.
        grid=(tiles, shares, k, j),
        out_shape=[
            jax.ShapeDtypeStruct((shares, *rows.shape), jnp.float32),
            jax.ShapeDtypeStruct((shares, *rows.shape[:3]), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=STAGES),
        interpret=interpret,
        name="paged_attention",
    )(rows, pages, tables, row_limits)
    # [s, j, k, r, ...] -> [s, j, t, n, ...]
    parts = (
        x[:, :, :, :used].reshape(shares, j, k, t, sharing, *x.shape[4:]).swapaxes(2, 3)
        for x in parts
    )
    return merge(*(x.reshape(shares, j, t, n, *x.shape[5:]) for x in parts))


def _shares(heads: int, tiles: int, keys: int) -> int:
    """Return among how many programs the keys of a tile are divided.

    Args:
        heads: Number of kv heads of all jobs.
        tiles: Number of tiles of each head.
        keys: Number of keys for which a table has room.
    """
    shares = pl.cdiv(PROGRAMS, heads * tiles)
    if tiles == 1:
        shares = max(shares, pl.cdiv(keys, SPAN))
    return min(shares, pl.cdiv(keys, BLOCK))


def _dot(a: Array, b: Array, contract: int) -> Float[Array, "_ _"]:
    dimensions = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _kernel(q, pages, tables, limits, out, logsumexp):
    tile, share, head, job = (pl.program_id(axis) for axis in range(4))
    shares, _, _, r, h = out.shape
    size = r // pl.num_programs(0)
    own = pl.ds(tile * size, size)
    queries = q[job, head, own, :]
    limit = limits[job, own]
    end = limit.max()
    blocks = pl.cdiv(end, BLOCK)
    first, last = (jax.lax.div(blocks * i, shares) for i in (share, share + 1))

    def visit(block, sums):
        values, total, before = sums
        key = block * BLOCK + jnp.arange(BLOCK)
        valid = key < end
        page = triton.load(tables.at[job, jax.lax.div(key, pages.shape[3])], mask=valid, other=0)
        token = jax.lax.rem(key, pages.shape[3])
        # Keys after the end may be NaN. They have no weight, but NaN * 0 is NaN.
        k, v = (
            triton.load(
                pages.at[page[:, None], side, head, token[:, None], jnp.arange(h)[None]],
                mask=jnp.broadcast_to(valid[:, None], (BLOCK, h)),
                other=0.0,
            )
            for side in range(2)
        )
        seen = key[None] < limit[:, None]
        scores = jnp.where(seen, _dot(queries, k, 1) * (h**-0.5 * LOG2_E), MASKED)
        top = jnp.maximum(before, scores.max(axis=1))
        weights = jnp.where(seen, jnp.exp2(scores - top[:, None]), 0.0)
        shrink = jnp.exp2(before - top)
        more = _dot(weights.astype(v.dtype), v, 0)
        return values * shrink[:, None] + more, total * shrink + weights.sum(axis=1), top

    zeros = jnp.zeros(size, jnp.float32)
    sums = jnp.zeros((size, h), jnp.float32), zeros, jnp.full(size, MASKED, jnp.float32)
    values, total, top = jax.lax.fori_loop(first, last, visit, sums)
    any_seen = total > 0
    natural = (top + jnp.log2(total)) / LOG2_E
    logsumexp[share, job, head, own] = jnp.where(any_seen, natural, MASKED)
    triton.store(
        out.at[share, job, head, own, :],
        values / total[:, None],
        mask=jnp.broadcast_to(any_seen[:, None], values.shape),
    )
