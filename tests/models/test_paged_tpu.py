"""The TPU's kernels over pages: interpreted, against NumPy, and compiled for TPUs without one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import paged_tpu
from models.attention.target import MASKED
from tests.models.program import FOR_TPU, run

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
        q = jax.ShapeDtypeStruct((4, 1, 8, h), dtype)
        return paged_tpu.supports(q, jax.ShapeDtypeStruct((9, 2, 2, u, h), dtype))

    assert supported(jnp.bfloat16, 64, 128) and supported(jnp.float32, 16, 128)
    assert not supported(jnp.float16, 64, 128) and not supported(jnp.bfloat16, 8, 128)
    assert not supported(jnp.bfloat16, 64, 64)


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "tensor"), [("v5e:2x2", 4), ("v6e:2x2", 1), ("v5p:2x2x1", 2)])
def test_decoding_compiles_for_tpu_without_a_copy_of_the_pool(topology, tensor):
    """Tokens of 56 rows are written to the pages of four layers, which are then attended to."""
    pytest.importorskip("libtpu", reason="the TPU's compiler: pip install -e '.[tpu]'")
    run(
        f"""
        import jax, jax.numpy as jnp, numpy as np
        from jax.experimental import topologies
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from models.attention.paged_tpu import attend, write

        topology = topologies.get_topology_desc(platform="tpu", topology_name="{topology}")
        mesh = Mesh(np.array(topology.devices[:{tensor}]), ["tensor"])
        heads, pool_axes = P(None, None, "tensor"), P(None, None, None, "tensor")

        def layer(pool, number, q, tables, limits, numbers, slots):
            pages = pool.reshape(-1, *pool.shape[2:])
            k = q.reshape(len(q), pool.shape[3], -1, q.shape[-1])[:, :, 0]
            pages = write(pages, k, k, numbers + number * 2049, slots, interpret=False)
            out = attend(q, pages, tables + number * 2049, limits, interpret=False).out
            return out.astype(q.dtype), pages.reshape(pool.shape)

        def token(pool, q, *rows):
            def body(carry, number):
                return mapped(carry[1], number, carry[0], *rows), None
            specs = (pool_axes, P(), heads, P(), P(), P(), P())
            mapped = jax.shard_map(
                layer, mesh=mesh, in_specs=specs, out_specs=(heads, pool_axes), check_vma=False)
            return jax.lax.scan(body, (q, pool), jnp.arange(4))[0]

        arrays = [(pool_axes, jnp.bfloat16, 4, 2049, 2, 8, 64, 128),
            (heads, jnp.bfloat16, 56, 1, 32, 128),
            *((P(), jnp.int32, *shape) for shape in ((56, 128), (56, 1), (56,), (56,)))]
        with jax.set_mesh(mesh):
            pool, *rest = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, axes))
                for axes, dtype, *shape in arrays]
            compiled = jax.jit(token, donate_argnums=0).lower(pool, *rest).compile()
        memory = compiled.memory_analysis()
        held = 2 * int(np.prod(pool.sharding.shard_shape(pool.shape)))
        assert memory.alias_size_in_bytes == held and memory.temp_size_in_bytes < held / 100
        print("done")
        """,
        **FOR_TPU,
    )
