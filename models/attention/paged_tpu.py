"""Attention over pages on TPU: decoding, prompts that a group shares, and chunks of prompts.

Decoding is bound by reading pages, so the kernel reads only the pages that are seen, once, and
always has reads in flight. What the jobs need becomes a list of blocks at run time, and the grid is
that list. Here a block is two pages of 64 tokens:

    job    table      limit    steps (job, block, tokens left)    pages read
    0      4 2 9 7    200      (0, 0, 200) (0, 1, 72)             4 2, 9 7
    1      . . . .      0
    2      5 . . .     64      (2, 0, 64)                         5

While a step computes, the pages of the next ones arrive in other buffers. All queries and heads
that share a kv head are the rows of one matmul. Softmax and sums are in float32.

Shapes: j jobs of t queries; n query heads, k kv heads, h head_dim; x pages of u tokens in the pool,
m of them in the table of a job. The kernel must run in a shard_map over several devices.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from models.attention.target import MASKED, Partial

# Bytes of a block. Reading them takes at least twice as long as the other work of a step that
# decodes (compiled for v5e and v6e, with 1 to 8 kv heads).
BLOCK = 2**20
# Largest number of a kv head's scores in a block; with 512 queries, 512 tokens.
SCORES = 2**18
# Reads in flight, in seconds at the chip's bandwidth. For 2 kv heads that is 2,048 tokens on v5e
# and 4,096 on v6e: the blocks of tpu-inference's tuned table.
IN_FLIGHT = 2.5e-6
# Registers hold 8 x 128 numbers: a statistic per query is repeated along the lanes.
LANES = 128
# What the list says about a step: its job, which of the job's blocks it attends to, and the tokens
# from the beginning of that block to the largest limit of the job.
JOB, PART, LEFT = range(3)


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
    # The cores of a chip share its heads.
    cores = cores if k % cores == 0 else 1
    page_bytes = 2 * k // cores * u * h * pages.dtype.itemsize
    width = max(1, min(m, BLOCK // page_bytes, SCORES // (rows * u)))
    buffers = 1 + max(1, in_flight // (width * page_bytes))
    steps, count = _schedule(limits.max(axis=1), width * u, j * pl.cdiv(m, width))

    def of_job(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, k // cores, *shape), lambda core, step, steps, _: (steps[JOB, step], core, 0, 0)
        )

    statistics = pltpu.VMEM((k // cores, rows, LANES), jnp.float32)
    result = pl.pallas_call(
        functools.partial(_kernel, table_length=m),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(cores, count),
            in_specs=[
                pl.BlockSpec((None, rows, 1), lambda _, step, steps, __: (steps[JOB, step], 0, 0)),
                of_job(rows, h),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=of_job(rows, h + LANES),
            scratch_shapes=[
                pltpu.VMEM((buffers, width, 2, k // cores, u, h), pages.dtype),
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
        steps,
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


def _schedule(
    lengths: Int[Array, " j"], size: int, most: int
) -> tuple[Int[Array, "3 most"], Int[Array, ""]]:
    """Return the list of steps, and how many there are, for blocks of `size` tokens."""
    ends = jnp.cumsum(pl.cdiv(lengths, size))
    step = jnp.arange(most)
    job = jnp.searchsorted(ends, step, side="right", method="compare_all")
    # If nothing is seen, one step reads nothing.
    job = jnp.minimum(job, len(lengths) - 1)
    part = step - jnp.pad(ends, (1, 0))[job]
    left = lengths[job] - part * size
    return jnp.stack([job, part, left]), jnp.maximum(ends[-1], 1)


def _kernel(
    steps, tables, limits, q, pool, out, buffers, arrived, running_max, running_sum, *, table_length
):
    core, step = pl.program_id(0), pl.program_id(1)
    slots, width, _, k, u, h = buffers.shape
    rows, size = q.shape[1], width * u
    slot, part, left = jax.lax.rem(step, slots), steps[PART, step], steps[LEFT, step]

    def pages_of(left: Any) -> Any:
        return jnp.minimum(jax.lax.div(left + u - 1, u), width)

    def fetch(later: Any, _: None) -> None:
        """Start to read the pages of a step."""
        first = steps[JOB, later] * table_length + steps[PART, later] * width
        target = jax.lax.rem(later, slots)

        def start(page: Any, _: None) -> None:
            source = pool.at[tables[first + page], :, pl.ds(core * k, k)]
            copy = pltpu.make_async_copy(source, buffers.at[target, page], arrived.at[target])
            copy.start()

        jax.lax.fori_loop(0, pages_of(steps[LEFT, later]), start, None)

    def wait(target: Any) -> None:
        pltpu.make_async_copy(target, target, arrived.at[slot]).wait()

    # The first step fetches for all buffers, and each later one for the buffer that became free.
    begin = jnp.where(step == 0, 0, step + slots - 1)
    jax.lax.fori_loop(begin, jnp.minimum(step + slots, pl.num_programs(1)), fetch, None)
    full = left >= size
    pl.when(full)(lambda: wait(buffers.at[slot]))
    pages = jnp.where(full, 0, pages_of(left))
    jax.lax.fori_loop(0, pages, lambda page, _: wait(buffers.at[slot, page]), None)

    def clear(page: Any, _: None) -> None:
        """Clear values that nobody sees: their weights are 0, but 0 * NaN is NaN."""
        token = page * u + jax.lax.broadcasted_iota(jnp.int32, (k, u, h), 1)
        buffers[slot, page, 1] = jnp.where(token < left, buffers[slot, page, 1], 0)

    jax.lax.fori_loop(jnp.minimum(jax.lax.div(left, u), width), width, clear, None)
    token = part * size + jax.lax.broadcasted_iota(jnp.int32, (rows, size), 1)
    seen = token < limits[...]

    def start(i: Any) -> None:
        running_max[i] = jnp.full((rows, LANES), MASKED)
        running_sum[i] = jnp.zeros((rows, LANES))
        out[i] = jnp.zeros((rows, h + LANES))

    def visit(i: Any) -> None:
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

    def finish(i: Any) -> None:
        out[i, :, :h] = out[i, :, :h] / running_sum[i, :, :1]
        out[i, :, h:] = running_max[i] + jnp.log(running_sum[i])

    def each_head(act: Any) -> None:
        # Few rows: side by side, so that matmuls and softmax overlap. Many would be long programs.
        jax.lax.fori_loop(0, k, lambda i, _: act(i), None, unroll=rows < LANES)

    pl.when(part == 0)(lambda: each_head(start))
    each_head(visit)
    pl.when(left <= size)(lambda: each_head(finish))
