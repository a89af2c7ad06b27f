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

# Bytes of a block. On v5e, reading it takes 1.3 us, and the rest of a decoding step 720 bundles or
# 0.5 us (compiled, for 2 and 8 kv heads).
BLOCK = 2**20
# Largest number of a kv head's scores in a block; with 512 queries, 512 tokens.
SCORES = 2**18
# Reads in flight, in seconds at the chip's bandwidth. For 2 kv heads that is 2,048 tokens on v5e
# and 4,096 on v6e: the blocks of tpu-inference's tuned table.
IN_FLIGHT = 2.5e-6
# A register and a tile in memory hold 8 x 128 numbers. A statistic of a query is repeated along
# the lanes.
SUBLANES, LANES = 8, 128
# Tokens whose tiles are in flight together when they are written.
TOKENS = 128


def supports(
    q: Float[Array | jax.ShapeDtypeStruct, "j t n h"],
    pages: Float[Array | jax.ShapeDtypeStruct, "x 2 k u h"],
) -> bool:
    """Return whether the kernel can take these arrays: bfloat16 or float32, heads of 128, and pages
    of whole tiles."""
    tiles = pages.shape[3] % 16 == 0 and q.shape[3] == LANES
    return tiles and q.dtype == pages.dtype and q.dtype in (jnp.bfloat16, jnp.float32)


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
    cores, in_flight = _chip(interpret)
    # Many rows fill the chip's memory: one head after another. The cores of a chip share the heads.
    groups = k if rows >= LANES or k % cores else cores
    page_bytes = 2 * k // groups * u * h * pages.dtype.itemsize
    width = max(1, min(m, BLOCK // page_bytes, SCORES // (rows * u)))
    buffers = 1 + max(1, pl.cdiv(in_flight, width * page_bytes))
    lengths = limits.max(axis=1)
    ends = jnp.cumsum(pl.cdiv(lengths, width * u))
    # In a loop over layers the compiler repeats what is longer than its inputs: only this list is.
    steps = jnp.arange(j * pl.cdiv(m, width))
    jobs = jnp.searchsorted(ends[:-1], steps, side="right", method="compare_all")

    def of_job(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, k // groups, *shape), lambda group, step, jobs, *_: (jobs[step], group, 0, 0)
        )

    statistics = pltpu.VMEM((k // groups, rows, LANES), jnp.float32)
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
                pltpu.VMEM((buffers, width, 2, k // groups, u, h), pages.dtype),
                pltpu.SemaphoreType.DMA((buffers,)),
                statistics,
                statistics,
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


def _chip(interpret: bool) -> tuple[int, int]:
    """Return how many cores a call uses, and how many bytes each should have in flight."""
    if interpret:
        return 1, 0
    chip: Any = pltpu.get_tpu_info()
    return chip.num_cores, int(IN_FLIGHT * chip.mem_bw_bytes_per_second)


def _kernel(
    jobs, begins, lengths, tables, limits, q, pool, out, buffers, arrived, running_max, running_sum
):
    group, step = pl.program_id(0), pl.program_id(1)
    slots, width, _, k, u, h = buffers.shape
    rows, size = q.shape[1], width * u
    slot = jax.lax.rem(step, slots)
    table = tables.shape[0] // lengths.shape[0]

    def block_of(step: Any) -> tuple[Any, Any, Any]:
        """Return a step's block of its job, how many tokens are left there, and how many pages."""
        block = step - begins[jobs[step]]
        left = lengths[jobs[step]] - block * size
        return block, left, jnp.minimum(jax.lax.div(left + u - 1, u), width)

    def fetch(later: Any, _: None) -> None:
        """Start to read the pages of a step."""
        block, _, pages = block_of(later)
        first = jobs[later] * table + block * width
        target = jax.lax.rem(later, slots)

        def start(page: Any, _: None) -> None:
            source = pool.at[tables[first + page], :, pl.ds(group * k, k)]
            copy = pltpu.make_async_copy(source, buffers.at[target, page], arrived.at[target])
            copy.start()

        jax.lax.fori_loop(0, pages, start, None)

    def wait(target: Any) -> None:
        pltpu.make_async_copy(target, target, arrived.at[slot]).wait()

    # The first step fetches for all buffers, and each later one for the buffer that became free.
    earliest = jnp.where(step == 0, 0, step + slots - 1)
    jax.lax.fori_loop(earliest, jnp.minimum(step + slots, pl.num_programs(1)), fetch, None)
    block, left, pages = block_of(step)
    full = pages == width
    pl.when(full)(lambda: wait(buffers.at[slot]))
    each = jnp.where(full, 0, pages)
    jax.lax.fori_loop(0, each, lambda page, _: wait(buffers.at[slot, page]), None)

    def clear(page: Any, _: None) -> None:
        """Clear values that nobody sees: their weights are 0, but 0 * NaN is NaN."""
        token = page * u + jax.lax.broadcasted_iota(jnp.int32, (k, u, h), 1)
        buffers[slot, page, 1] = jnp.where(token < left, buffers[slot, page, 1], 0)

    jax.lax.fori_loop(jnp.minimum(jax.lax.div(left, u), width), width, clear, None)
    token = block * size + jax.lax.broadcasted_iota(jnp.int32, (rows, size), 1)
    seen = token < limits[...]

    @pl.when(block == 0)
    def _():
        running_max[...] = jnp.full_like(running_max, MASKED)
        running_sum[...] = jnp.zeros_like(running_sum)
        out[...] = jnp.zeros_like(out)

    for i in range(k):
        keys, values = (buffers[slot, :, kind, i].reshape(size, h) for kind in (0, 1))
        product = jnp.einsum("rh,sh->rs", q[i], keys, preferred_element_type=jnp.float32)
        scores = jnp.where(seen, product * h**-0.5, MASKED)
        before = running_max[i]
        after = jnp.maximum(before, scores.max(axis=1, keepdims=True))
        weights = jnp.exp(scores - after[:, :1])
        rescale = jnp.exp(before - after)
        running_max[i] = after
        running_sum[i] = rescale * running_sum[i] + weights.sum(axis=1, keepdims=True)
        sums = jnp.dot(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        out[i, :, :h] = rescale[:, :1] * out[i, :, :h] + sums

    @pl.when(left <= size)
    def _():
        out[:, :, :h] = out[:, :, :h] / running_sum[:, :, :1]
        out[:, :, h:] = running_max[...] + jnp.log(running_sum[...])


def write(
    pages: Float[Array, "x 2 k u h"],
    k: Float[Array, "t k h"],
    v: Float[Array, "t k h"],
    places: Int[Array, " t"],
    interpret: bool,
) -> Float[Array, "x 2 k u h"]:
    """Write keys and values of tokens, in place if the compiler can reuse `pages`.

    Args:
        pages: the pool.
        k: a key per token.
        v: a value per token.
        places: where each token goes: page * u + its place in the page; nowhere if negative. Tokens
            that go to the same tile, 8 places of a page, must follow each other.
        interpret: whether to run away from a TPU, for tests.
    """
    t, heads, h = k.shape
    batch = min(t, TOKENS)
    batches = pl.cdiv(t, batch)
    kv = jnp.stack([k, v], axis=1)[:, :, :, None].astype(pages.dtype)
    # The kernel also looks at the places before and after a batch.
    fill = (1, batches * batch - t + 1)
    return pl.pallas_call(
        _write_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batches,),
            in_specs=[
                pl.BlockSpec((batch, 2, heads, 1, h), lambda i, _: (i, 0, 0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((batch, 2, heads, SUBLANES, h), pages.dtype),
                pltpu.SemaphoreType.DMA(()),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=interpret,
        name="paged_write",
    )(jnp.pad(places, fill, constant_values=-1), kv, pages)


def _write_kernel(places, kv, _, pool, tiles, done):
    """Read all tiles of a batch, change their rows, and write them: each tile once."""
    batch = kv.shape[0]
    per_page = pool.shape[3] // SUBLANES
    first = pl.program_id(0) * batch + 1

    def tile_of(i: Any) -> Any:
        # Eight places are a tile; no place is in tile -1.
        return places[first + i] >> 3

    def in_pool(tile: Any) -> Any:
        page, begin = jax.lax.div(tile, per_page), jax.lax.rem(tile, per_page) * SUBLANES
        return pool.at[page, :, :, pl.ds(pl.multiple_of(begin, SUBLANES), SUBLANES)]

    def wait(count: Any) -> None:
        copy = pltpu.make_async_copy(tiles.at[0], tiles.at[0], done)
        jax.lax.fori_loop(0, count, lambda _, __: copy.wait(), None)

    def read(i: Any, count: Any) -> Any:
        tile = tile_of(i)
        begins = (tile >= 0) & ((i == 0) | (tile != tile_of(i - 1)))

        @pl.when(begins)
        def _():
            pltpu.make_async_copy(in_pool(tile), tiles.at[count], done).start()

        return count + begins.astype(jnp.int32)

    def change(i: Any, number: Any) -> Any:
        tile = tile_of(i)
        ends = (tile >= 0) & ((i == batch - 1) | (tile != tile_of(i + 1)))

        @pl.when(tile >= 0)
        def _():
            row = jax.lax.broadcasted_iota(jnp.int32, tiles.shape[1:], 2)
            own = row == places[first + i] - tile * SUBLANES
            tiles[number] = jnp.where(own, kv[i], tiles[number])

        @pl.when(ends)
        def _():
            pltpu.make_async_copy(tiles.at[number], in_pool(tile), done).start()

        return number + ends.astype(jnp.int32)

    count = jax.lax.fori_loop(0, batch, read, jnp.int32(0))
    wait(count)
    jax.lax.fori_loop(0, batch, change, jnp.int32(0))
    wait(count)
