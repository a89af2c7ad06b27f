"""Attention over pages on TPU, for decoding and for chunks of prompts; and the writing of pages.

Decoding is bound by reading pages, so the kernel reads only the pages that are seen, once, and
always has reads in flight. What the jobs need becomes a list of blocks at run time, and the grid is
that list. Here a block is two pages of 64 tokens:

    job    table      limit    steps    pages read
    0      4 2 9 7    200      0, 1     4 2, 9 7
    1      . . . .      0
    2      5 . . .     64      2        5

While a step computes, the pages of the next ones arrive in other buffers. All queries and heads
that share a kv head are the rows of one matmul. Softmax and sums are in float32.

Tokens are written by a kernel as well: XLA's scatter of whole tokens transposes the pool, and its
scatter of rows of one head handles 16 rows at a time (compiled). By their bundles and 0.7 us for a
copy, 56 tokens of 2 heads take 32 us a layer on v5e by such a scatter, and 5 us by the kernel.

Shapes: j jobs of t queries; n query heads, k kv heads, h head_dim; x pages of u tokens in the pool,
m of them in the table of a job. The kernel must run in a shard_map over several devices.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from models.attention.target import MASKED, Partial

# Bytes of a block. On v5e, reading it takes 1.3 us, and the rest of a decoding step 800 to 870
# bundles, or 0.6 us (compiled, for 2 and 8 kv heads).
BLOCK = 2**20
# Largest number of a kv head's scores in a block; with 512 queries, 512 tokens.
SCORES = 2**18
# Blocks held on the chip. All but one are in flight: with 2 kv heads, 4,096 tokens, the largest
# block that tpu-inference's tuned table has for v6e; on v5e it has 2,048.
BUFFERS = 5
# A register and a tile in memory hold 8 x 128 numbers. A statistic of a query is repeated along
# the lanes.
SUBLANES, LANES = 8, 128
# Tokens whose tiles are in flight together when they are written.
TOKENS = 128


def supports(pages: Float[Array | jax.ShapeDtypeStruct, "x 2 k u h"]) -> bool:
    """Return whether the kernels can take these pages and queries of their type: bfloat16 or
    float32, heads of 128, and pages of whole tiles."""
    tiles = pages.shape[3] % 16 == 0 and pages.shape[4] == LANES
    return tiles and pages.dtype in (jnp.bfloat16, jnp.float32)


def attend(
    q: Float[Array, "j t n h"],
    pages: Float[Array, "x 2 k u h"],
    tables: Int[Array, "j m"],
    limits: Int[Array, "j t"],
    interpret: bool,
) -> Partial:
    """Attend to pages: a query sees as many tokens as its limit, from the beginning of its table.

    Args:
        q: queries; head i uses kv head i // (n / k).
        pages: keys and values. Tokens that no query of a job sees may be anything.
        tables: the pages of each job; entries beyond its limits may be any page.
        limits: how many tokens each query sees.
        interpret: whether to run away from a TPU, for tests.
    """
    j, t, n, h = q.shape
    _, _, k, u, _ = pages.shape
    m = tables.shape[1]
    rows = t * n // k
    cores = 1 if interpret else pltpu.get_tpu_info().num_cores
    # Many rows fill the chip's memory: one head after another. The cores of a chip share the heads.
    groups = k if rows >= LANES or k % cores else cores
    page_bytes = 2 * k // groups * u * h * pages.dtype.itemsize
    width = max(1, min(m, BLOCK // page_bytes, SCORES // (rows * u)))
    lengths = limits.max(axis=1)
    ends = jnp.cumsum(pl.cdiv(lengths, width * u))
    # The job of each step. A compiled loop over layers repeats what is longer than its inputs; the
    # kernel finds everything else.
    steps = jnp.arange(j * pl.cdiv(m, width))
    jobs = jnp.searchsorted(ends[:-1], steps, side="right", method="compare_all")

    def of_job(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, k // groups, *shape), lambda group, step, jobs, *_: (jobs[step], group, 0, 0)
        )

    result = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            # If nothing is seen, one step reads nothing.
            grid=(groups, jnp.maximum(ends[-1], 1)),
            in_specs=[
                pl.BlockSpec((None, rows, 1), lambda _, step, jobs, *__: (jobs[step], 0, 0)),
                of_job(rows, h),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=of_job(rows, h + LANES),
            scratch_shapes=[
                pltpu.VMEM((BUFFERS, width, 2, k // groups, u, h), pages.dtype),
                pltpu.SemaphoreType.DMA((BUFFERS,)),
                pltpu.VMEM((k // groups, rows, LANES), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((j, k, rows, h + LANES), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="paged_attention",
    )(
        jobs,
        jnp.pad(ends, (1, 0)),
        lengths,
        tables.reshape(-1),
        jnp.repeat(limits, n // k, axis=1)[:, :, None],
        q.reshape(j, t, k, n // k, h).swapaxes(1, 2).reshape(j, k, rows, h),
        pages,
    )
    by_query = result.reshape(j, k, t, n // k, -1).swapaxes(1, 2).reshape(j, t, n, -1)
    # Nothing is written for jobs without steps.
    seen = (limits > 0)[:, :, None]
    out = jnp.where(seen[..., None], by_query[..., :h], 0)
    return Partial(out, jnp.where(seen, by_query[..., h], MASKED))


def _kernel(*refs):
    jobs, begins, lengths, tables, limits, q, pool, out, buffers, arrived, running_max = refs
    group, step = pl.program_id(0), pl.program_id(1)
    _, width, _, k, u, h = buffers.shape
    rows, size = q.shape[1], width * u

    def place(step: Any) -> tuple[Any, Any, Any]:
        """Return a step's block of its job, how many tokens are left from there, and its buffer."""
        block = step - begins[jobs[step]]
        return block, lengths[jobs[step]] - block * size, jax.lax.rem(step, BUFFERS)

    def copy_pages(step: Any, act: Any) -> None:
        """Call `act` with the copy of each page that a step needs."""
        block, left, buffer = place(step)
        first = jobs[step] * (tables.shape[0] // lengths.shape[0]) + block * width

        def copy(page: Any, _: None) -> None:
            source = pool.at[tables[first + page], :, pl.ds(group * k, k)]
            act(pltpu.make_async_copy(source, buffers.at[buffer, page], arrived.at[buffer]))

        pages = jnp.minimum(jax.lax.div(left + u - 1, u), width)
        jax.lax.fori_loop(0, pages, copy, None)

    def start(later: Any, _: None) -> None:
        copy_pages(later, lambda copy: copy.start())

    # The first step fills all buffers, and each later one the buffer that became free.
    earliest = jnp.where(step == 0, 0, step + BUFFERS - 1)
    jax.lax.fori_loop(earliest, jnp.minimum(step + BUFFERS, pl.num_programs(1)), start, None)
    copy_pages(step, lambda copy: copy.wait())

    block, left, buffer = place(step)

    def clear(page: Any, _: None) -> None:
        """Clear values that nobody sees: their weights are 0, but 0 * NaN is NaN."""
        token = page * u + jax.lax.broadcasted_iota(jnp.int32, (k, u, h), 1)
        buffers[buffer, page, 1] = jnp.where(token < left, buffers[buffer, page, 1], 0)

    jax.lax.fori_loop(jnp.minimum(jax.lax.div(left, u), width), width, clear, None)
    seen = block * size + jax.lax.broadcasted_iota(jnp.int32, (rows, size), 1) < limits[...]

    @pl.when(block == 0)
    def _():
        running_max[...] = jnp.full_like(running_max, MASKED)
        out[...] = jnp.zeros_like(out)

    for i in range(k):
        keys, values = (buffers[buffer, :, kind, i].reshape(size, h) for kind in (0, 1))
        product = jnp.einsum("rh,sh->rs", q[i], keys, preferred_element_type=jnp.float32)
        scores = jnp.where(seen, product * h**-0.5, MASKED)
        highest = jnp.maximum(running_max[i], scores.max(axis=1, keepdims=True))
        weights = jnp.exp(scores - highest[:, :1])
        rescale = jnp.exp(running_max[i] - highest)
        running_max[i] = highest
        sums = jnp.dot(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        out[i, :, :h] = rescale[:, :1] * out[i, :, :h] + sums
        out[i, :, h:] = rescale * out[i, :, h:] + weights.sum(axis=1, keepdims=True)

    @pl.when(left <= size)
    def _():
        out[:, :, :h] = out[:, :, :h] / out[:, :, h : h + 1]
        out[:, :, h:] = running_max[...] + jnp.log(out[:, :, h:])


def write(
    pages: Float[Array, "x 2 k u h"],
    k: Float[Array, "t k h"],
    v: Float[Array, "t k h"],
    numbers: Int[Array, " t"],
    slots: Int[Array, " t"],
    interpret: bool,
) -> Float[Array, "x 2 k u h"]:
    """Write keys and values of tokens, in place if the compiler can reuse `pages`.

    Args:
        pages: the pool.
        k: a key per token.
        v: a value per token.
        numbers: the page of each token; numbers of no page: it is not written.
        slots: its place in the page. Tokens that go to the same tile, 8 slots, must follow each
            other.
        interpret: whether to run away from a TPU, for tests.
    """
    x, _, heads, u, h = pages.shape
    batch = min(len(k), TOKENS)
    batches = pl.cdiv(len(k), batch)
    places = jnp.where((numbers >= 0) & (numbers < x), numbers * u + slots, -1)
    tiled = (x, 2, heads, u // SUBLANES, SUBLANES, h)
    in_place = pl.BlockSpec(memory_space=pl.ANY)
    written = pl.pallas_call(
        _write_kernel,
        grid=(batches,),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((batch, 2, heads, 1, h), lambda i: (i, 0, 0, 0, 0)),
            in_place,
        ],
        out_specs=in_place,
        scratch_shapes=[
            pltpu.VMEM((batch, 2, heads, SUBLANES, h), pages.dtype),
            pltpu.SemaphoreType.DMA(()),
        ],
        out_shape=jax.ShapeDtypeStruct(tiled, pages.dtype),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=interpret,
        name="paged_write",
    )(
        # The kernel also looks at the place after a token.
        jnp.pad(places, (0, batches * batch - len(k) + 1), constant_values=-1),
        jnp.stack([k, v], axis=1)[:, :, :, None].astype(pages.dtype),
        pages.reshape(tiled),
    )
    return written.reshape(pages.shape)


def _write_kernel(places, kv, _, pool, tiles, done):
    """Read all tiles of a batch, change their rows, and write them: each tile once.

    A tile is held where its last token is.
    """
    batch = len(kv)
    first = pl.program_id(0) * batch

    def ends(i: Any) -> Any:
        """Return whether a token is the last of its tile in this batch; no place is in tile -1."""
        tile = places[first + i] >> 3
        return (tile >= 0) & ((i == batch - 1) | (tile != places[first + i + 1] >> 3))

    def each_tile(act: Any) -> None:
        """Call `act` with each tile, in the pool and here."""

        def visit(i: Any, _: None) -> None:
            tile, per_page = places[first + i] >> 3, pool.shape[3]
            there = pool.at[jax.lax.div(tile, per_page), :, :, jax.lax.rem(tile, per_page)]
            pl.when(ends(i))(lambda: act(there, tiles.at[i]))

        jax.lax.fori_loop(0, batch, visit, None)

    def change(backwards: Any, last: Any) -> Any:
        i = batch - 1 - backwards
        last = jnp.where(ends(i), i, last)
        row = jax.lax.broadcasted_iota(jnp.int32, tiles.shape[1:], 2)
        own = row == jax.lax.rem(places[first + i], SUBLANES)
        tiles[last] = jnp.where(own, kv[i], tiles[last])
        return last

    each_tile(lambda there, here: pltpu.make_async_copy(there, here, done).start())
    each_tile(lambda there, here: pltpu.make_async_copy(there, here, done).wait())
    jax.lax.fori_loop(0, batch, change, jnp.int32(0))
    each_tile(lambda there, here: pltpu.make_async_copy(here, there, done).start())
    each_tile(lambda there, here: pltpu.make_async_copy(here, there, done).wait())
