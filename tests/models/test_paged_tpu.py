"""The TPU's kernel over pages: interpreted, against sums in NumPy, and compiled for TPUs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import paged_tpu
from models.attention.target import MASKED

rng = np.random.default_rng(0)


def expect(q, pages, tables, limits) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and log-sum-exps, summed query by query in float64."""
    j, t, n, h = q.shape
    out = np.zeros((j, t, n, h))
    logsumexp = np.full((j, t, n), MASKED, np.float32)
    for job, query in zip(*np.nonzero(limits), strict=True):
        kv = np.concatenate(pages[tables[job]], axis=2)[:, :, : limits[job, query]]
        for head in range(n):
            keys, values = kv[:, head // (n // pages.shape[2])].astype(np.float64)
            weights = np.exp(keys @ q[job, query, head] * h**-0.5)
            out[job, query, head] = weights @ values / weights.sum()
            logsumexp[job, query, head] = np.log(weights.sum())
    return out, logsumexp


def draw_limits(j: int, t: int, u: int, m: int) -> np.ndarray:
    """Limits at borders of pages and anywhere; a job that sees nothing, consecutive tokens, a group
    some of whose rows share the same pages."""
    limits = rng.choice([0, 1, u - 1, u, u + 1, 2 * u, m * u - 1, m * u], size=(j, t))
    anywhere = rng.integers(0, m * u + 1, size=(j, t))
    limits = np.where(rng.random((j, t)) < 0.5, limits, anywhere)
    limits[1] = 0
    limits[2] = np.maximum(rng.integers(1, m * u + 1) - np.arange(t), 0)[::-1]
    limits[3] = rng.integers(1, m * u + 1) * rng.integers(0, 2, size=t)
    return limits.astype(np.int32)


@pytest.mark.parametrize(
    ("t", "n", "k", "cores", "dtype", "tolerance"),
    [
        (1, 4, 1, 1, np.float32, 1e-5),
        (1, 8, 8, 2, np.float32, 1e-5),
        (8, 4, 2, 1, np.float32, 1e-5),
        (8, 6, 2, 2, jnp.bfloat16, 0.02),
        (64, 4, 2, 2, np.float32, 1e-5),
    ],
)
def test_equals_sums_in_numpy(monkeypatch, t, n, k, cores, dtype, tolerance):
    """Blocks of two pages, in several buffers. What is not seen is NaN, inf or noise."""
    j, u, h, m = 6, 8, 16, 7
    page_bytes = 2 * k * u * h * np.dtype(dtype).itemsize // cores
    monkeypatch.setattr(paged_tpu, "BLOCK", 2 * page_bytes)
    monkeypatch.setattr(paged_tpu, "_chip", lambda interpret: (cores, 5 * page_bytes))
    attend = jax.jit(functools.partial(paged_tpu.attend, interpret=True))
    for case in range(4):
        limits = np.zeros((j, t), np.int32) if case == 0 else draw_limits(j, t, u, m)
        # Some pages belong to no job.
        tables = rng.permutation(j * m + 3)[: j * m].reshape(j, m).astype(np.int32)
        q = np.asarray(rng.normal(size=(j, t, n, h)), dtype)
        shape = (j * m + 3, 2, k, u, h)
        pages = np.asarray(rng.choice([np.nan, np.inf, -np.inf, 9.0], size=shape), dtype)
        for job in range(j):
            for token in range(limits[job].max()):
                pages[tables[job, token // u], :, :, token % u] = rng.normal(size=(2, k, h))
        found = attend(q, pages, tables, limits)
        expected = expect(q.astype(np.float32), pages.astype(np.float32), tables, limits)
        np.testing.assert_allclose(found.out, expected[0], atol=tolerance, rtol=0)
        np.testing.assert_allclose(found.logsumexp, expected[1], atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "u", "h", "expected"),
    [
        (jnp.bfloat16, 64, 128, True),
        (jnp.float32, 16, 128, True),
        (jnp.float16, 64, 128, False),
        (jnp.bfloat16, 8, 128, False),
        (jnp.bfloat16, 64, 64, False),
    ],
)
def test_what_the_kernel_supports(dtype, u, h, expected):
    q = jax.ShapeDtypeStruct((4, 1, 8, h), dtype)
    pages = jax.ShapeDtypeStruct((9, 2, 2, u, h), dtype)
    assert paged_tpu.supports(q, pages) == expected
