"""Attention over pages in Triton: interpreted against NumPy, and lowered for CUDA without a GPU."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from models.attention import paged_triton
from models.attention.target import MASKED
from models.sharding import MESH_AXES


def expected(q, pages, tables, limits) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp of each query and head, one by one."""
    out = np.zeros(q.shape)
    logsumexp = np.full(q.shape[:3], np.float32(MASKED), np.float64)
    for job, query, head in np.argwhere(np.broadcast_to(limits[..., None], q.shape[:3])):
        own = pages[tables[job], :, head * pages.shape[2] // q.shape[2]]
        # [m, 2, u, h] -> [2, m * u, h]
        k, v = own.swapaxes(0, 1).reshape(2, -1, q.shape[3])[:, : limits[job, query]]
        scores = k @ q[job, query, head] * q.shape[3] ** -0.5
        logsumexp[job, query, head] = np.logaddexp.reduce(scores)
        out[job, query, head] = np.exp(scores - logsumexp[job, query, head]) @ v
    return out, logsumexp


def draw(seed: int, t: int, n: int, k: int, u: int) -> tuple[np.ndarray, ...]:
    """Five jobs on pages of all orders. What no query of a job sees is NaN or infinite."""
    rng = np.random.default_rng(seed)
    j, h, m = 5, 16, 320 // u
    # Limits are 0, at or beside the border of a page, or all keys; no query of job 0 sees any.
    limits = rng.integers(0, m + 1, (j, t)) * u + rng.integers(-1, 2, (j, t))
    limits = np.clip(limits, 0, m * u) * (np.arange(j)[:, None] > 0)
    limits[1, 0] = m * u
    tables = 1 + rng.permutation(j * m).reshape(j, m)
    pages = rng.normal(size=(1 + j * m, 2, k, u, h))
    pages[0] = np.nan
    for table, end in zip(tables, limits.max(axis=1), strict=True):
        keys = np.arange(m * u).reshape(m, u)
        seen = (keys < end)[:, None, None, :, None]
        pages[table] = np.where(seen, pages[table], rng.choice([np.nan, np.inf]))
        # Entries after the job's pages are any page.
        used = math.ceil(end / u)
        table[used:] = rng.integers(0, len(pages), m - used)
    return rng.normal(size=(j, t, n, h)), pages, tables, limits


@pytest.mark.parametrize("programs", [1, 264])
@pytest.mark.parametrize(
    ("t", "n", "k", "u"), [(1, 4, 2, 16), (8, 8, 1, 64), (8, 3, 1, 5), (64, 2, 1, 16)]
)
def test_equals_numpy(programs, t, n, k, u, monkeypatch):
    monkeypatch.setattr(paged_triton, "PROGRAMS", programs)
    q, pages, tables, limits = draw(t + u, t, n, k, u)
    for dtype, atol in ((jnp.float32, 1e-5), (jnp.bfloat16, 2e-2), (jnp.float16, 2e-3)):
        arrays = [jnp.asarray(q, dtype), jnp.asarray(pages, dtype), tables, limits]
        found = paged_triton.attend(*map(jnp.asarray, arrays), interpret=True)
        wanted = expected(*(np.asarray(x, np.float64) for x in arrays[:2]), *arrays[2:])
        for got, right in zip(found, wanted, strict=True):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, right, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("n", "u", "j", "t", "keys", "programs"),
    [
        (16, 16, 1, 1, 8192, 33 * 8),
        (16, 64, 1, 1, 128, 2 * 8),
        (32, 64, 64, 1, 8192, 4 * 512),
        (16, 16, 8, 8, 8192, 5 * 64),
        (32, 16, 1, 64, 8192, 9 * 8 * 4),
        (32, 64, 64, 128, 8192, 512 * 8),
    ],
)
def test_lowered_for_cuda_over_tensor(n, u, j, t, keys, programs):
    """Decoding, shared prompts and prefill; a device has all heads of the 2B or the 8B model."""
    heads, rest = PartitionSpec(None, None, "tensor"), PartitionSpec()
    mesh = AbstractMesh((1, 1, 2), MESH_AXES, (AxisType.Auto,) * 3)
    specs = (heads, heads, rest, rest)
    attend = functools.partial(paged_triton.attend, interpret=False)
    attend = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
    q = jax.ShapeDtypeStruct((j, t, 2 * n, 128), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((36 * 4096, 2, 16, u, 128), jnp.bfloat16)
    assert paged_triton.supports(pages)
    # XLA takes float32.
    assert not paged_triton.supports(jax.ShapeDtypeStruct(pages.shape, jnp.float32))
    tables, limits = (jax.ShapeDtypeStruct((j, x), jnp.int32) for x in (keys // u, t))
    text = jax.jit(attend).trace(q, pages, tables, limits).lower(lowering_platforms=("cuda",))
    [call] = [line for line in text.as_text().splitlines() if "xla.gpu.triton" in line]
    sizes = [int(size) for size in re.findall(r"grid_[xyz] = (\d+)", call)]
    assert np.prod(sizes) == programs
