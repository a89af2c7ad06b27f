"""The TPU's kernels over pages: interpreted, against NumPy, and compiled for TPUs without one."""

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
    ("t", "n", "k", "dtype", "tolerance"),
    [
        (1, 4, 1, np.float32, 1e-5),
        (1, 8, 8, np.float32, 1e-5),
        (8, 4, 2, np.float32, 1e-5),
        (8, 6, 2, jnp.bfloat16, 0.02),
        (64, 4, 2, np.float32, 1e-5),
    ],
)
def test_equal_numpy(monkeypatch, t, n, k, dtype, tolerance):
    """Blocks of two pages, in several buffers. What is not written is NaN, inf or noise."""
    j, u, h, m = 6, 16, 8, 5
    monkeypatch.setattr(paged_tpu, "BLOCK", 4 * k * u * h * np.dtype(dtype).itemsize)
    monkeypatch.setattr(paged_tpu, "TOKENS", 20)
    monkeypatch.setattr(paged_tpu, "BUFFERS", 3)
    attend = jax.jit(functools.partial(paged_tpu.attend, interpret=True))
    write = jax.jit(functools.partial(paged_tpu.write, interpret=True))
    for case in range(4):
        limits = np.zeros((j, t), np.int32) if case == 0 else draw_limits(j, t, u, m)
        # Some pages belong to no job.
        tables = rng.permutation(j * m + 3)[: j * m].reshape(j, m).astype(np.int32)
        q = np.asarray(rng.normal(size=(j, t, n, h)), dtype)
        shape = (j * m + 3, 2, k, u, h)
        before = np.asarray(rng.choice([np.nan, np.inf, 9.0], size=shape), dtype)
        pages = before.copy()
        new = np.asarray(rng.normal(size=(2, j, m * u, k, h)), dtype)
        places = (tables[:, :, None] * u + np.arange(u)).reshape(j, -1)
        places = np.where(np.arange(m * u) < limits.max(axis=1, keepdims=True), places, -1)
        for token in zip(*np.nonzero(places >= 0), strict=True):
            pages[places[token] // u, :, :, places[token] % u] = new[:, *token]
        # Backwards, so that what is not written comes before the end of a job, in the same batch.
        numbers = np.where(places < 0, rng.choice([-1, len(pages)], places.shape), places // u)
        where = (x.reshape(-1)[::-1] for x in (numbers, places % u))
        written = write(before, *new.reshape(2, -1, k, h)[:, ::-1], *where)
        np.testing.assert_array_equal(np.asarray(written, np.float32), pages.astype(np.float32))
        found = attend(q, pages, tables, limits)
        expected = expect(q.astype(np.float32), pages.astype(np.float32), tables, limits)
        np.testing.assert_allclose(found.out, expected[0], atol=tolerance, rtol=0)
        np.testing.assert_allclose(found.logsumexp, expected[1], atol=tolerance, rtol=0)


def test_what_the_kernels_support():
    def supported(dtype, u: int, h: int) -> bool:
        return paged_tpu.supports(jax.ShapeDtypeStruct((9, 2, 2, u, h), dtype))

    assert supported(jnp.bfloat16, 64, 128) and supported(jnp.float32, 16, 128)
    assert not supported(jnp.float16, 64, 128) and not supported(jnp.bfloat16, 8, 128)
    assert not supported(jnp.bfloat16, 64, 64)
