"""The paged cache against a textbook's attention; the choice of a kernel; the TPU's compiler."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from models.attention import PagedCache, SharedPages
from models.sharding import MESH_AXES
from tests.models.program import FOR_TPU, run

LAYERS, LAYER, HEAD_DIM = 3, 1, 16


class Sizes(NamedTuple):
    groups: int
    jobs: int
    """Of a group. One: no pages are shared."""
    tokens: int
    """Of a job."""
    kv_heads: int
    heads: int
    page: int
    pages: int
    """Of a table."""


CASES = {
    "decoding": Sizes(3, 2, 1, kv_heads=2, heads=4, page=4, pages=40),
    "decoding of many rows": Sizes(10, 8, 1, kv_heads=1, heads=2, page=4, pages=5),
    "drafts": Sizes(2, 2, 4, kv_heads=1, heads=3, page=16, pages=9),
    "prefill": Sizes(5, 1, 40, kv_heads=2, heads=2, page=8, pages=12),
}


@jax.jit
def attend(cache, q, k, v):
    return cache.attend(LAYER, q, k, v)


def tokens_of(pool: np.ndarray, table: np.ndarray, count: int) -> np.ndarray:
    """Keys and values [2, k, count, h] of the first tokens of a table."""
    pages = pool[LAYER, table].transpose(1, 2, 0, 3, 4)
    return pages.reshape(*pages.shape[:2], -1, HEAD_DIM)[:, :, :count]


def textbook(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Attention of a query [n, h] to keys and values [k, s, h]."""
    keys, values = (np.repeat(x, len(q) // len(x), axis=0) for x in (keys, values))
    scores = np.einsum("nh,nsh->ns", q, keys) / np.sqrt(HEAD_DIM)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ns,nsh->nh", weights / weights.sum(axis=1, keepdims=True), values)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", CASES)
def test_tokens_see_what_is_cached_and_new_ones_before_them(case, seed):
    """Where nothing is cached the pool is NaN, which must not be seen and stays."""
    size = CASES[case]
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    t, jobs, room = size.tokens, size.groups * size.jobs, size.pages * size.page
    numbers = rng.permutation((size.groups + jobs) * size.pages).reshape(-1, size.pages)
    shared, own = numbers[: size.groups], numbers[size.groups :]
    prefixes = rng.integers(1, room + 1, size.groups)
    # Jobs begin at both ends of a table, at a page's border, or anywhere.
    some = [0, size.page, room - 1, room, *rng.integers(0, room, 4)]
    cached = rng.choice(some, jobs)
    pool = np.full(
        (LAYERS, numbers.size, 2, size.kv_heads, size.page, HEAD_DIM), np.nan, np.float32
    )
    for table, count in zip([*shared, *own], [*prefixes, *cached], strict=True):
        for n in range(count):
            place = table[n // size.page], ..., n % size.page, slice(None)
            pool[:, *place] = draw(LAYERS, 2, size.kv_heads, HEAD_DIM)
    # Fewer tokens than there is room for, or none at all.
    new = rng.integers(0, t + 1, jobs)
    exists = np.arange(t) < new[:, None]
    offsets = np.where(exists, cached[:, None] + np.arange(t), -1)
    joins = rng.random((jobs, 1)) < 0.7
    limits = np.where(exists & joins, np.repeat(prefixes, size.jobs)[:, None], 0)
    limits = limits.reshape(size.groups, -1) * (size.jobs > 1)

    together = None if size.jobs == 1 else SharedPages(jnp.asarray(shared), jnp.asarray(limits))
    cache = PagedCache(*map(jnp.asarray, (pool, own, offsets)), shared=together)
    heads = size.heads, size.kv_heads, size.kv_heads
    q, k, v = (draw(jobs * t, count, HEAD_DIM) for count in heads)
    found, after = attend(cache, q, k, v)

    for token, offset in enumerate(offsets.flat):
        if 0 <= offset < room:
            page = own[token // t, offset // size.page]
            pool[LAYER, page, :, :, offset % size.page] = k[token], v[token]
    np.testing.assert_array_equal(after.pages, pool)
    for token, (offset, limit) in enumerate(zip(offsets.flat, limits.flat, strict=True)):
        job = token // t
        seen = [
            tokens_of(pool, shared[job // size.jobs], limit),
            tokens_of(pool, own[job], offset + 1),
        ]
        if offset < 0:
            assert not np.any(found[token])
        elif offset < room:
            expected = textbook(q[token], *np.concatenate(seen, axis=2))
            np.testing.assert_allclose(found[token], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("platform", "kind", "h", "kernel"),
    [
        ("tpu", "TPU v5e", 128, True),
        ("tpu", "TPU v5e", 64, False),
        ("gpu", "NVIDIA H100", 128, True),
        ("cpu", "cpu", 128, False),
    ],
)
def test_the_platform_of_the_mesh_chooses_the_kernel(platform, kind, h, kernel):
    def array(*shape: int, dtype: type = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def attend(pages, tables, offsets, q, k, v):
        return PagedCache(pages, tables, offsets).attend(1, q, k, v)

    whole = array(4, 2, dtype=jnp.int32), array(4, 1, dtype=jnp.int32)
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    mesh = AbstractMesh((1, 1, 2), MESH_AXES, (AxisType.Auto,) * 3, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        token = array(4, 8, h), array(4, 4, h), array(4, 4, h)
        program = str(jax.make_jaxpr(attend)(array(2, 9, 2, 4, 16, h), *whole, *token))
    assert "shard_map" in program and ("pallas_call" in program) == kernel


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "tensor"), [("v5e:2x2", 4), ("v6e:2x2", 1), ("v5p:2x2x1", 2)])
def test_decoding_compiles_for_tpu_without_a_copy_of_the_pool(topology, tensor):
    """Four tokens, 32 rows, four layers of the 8B model and half a million tokens of pages."""
    pytest.importorskip("libtpu", reason="the TPU's compiler: pip install -e '.[tpu]'")
    run(
        f"""
        import dataclasses, re
        import jax, jax.numpy as jnp, numpy as np
        from flax import nnx
        from jax.experimental import topologies
        from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
        from models.attention import PagedCache, SharedPages
        from models.qwen3_vl.sizes import qwen3_vl
        from models.text import TextDecoder
        from models.sharding import MESH_AXES, param_shardings

        tensor, dtype = {tensor}, jnp.bfloat16
        topology = topologies.get_topology_desc(platform="tpu", topology_name="{topology}")
        devices = np.array(topology.devices[:tensor]).reshape(1, 1, tensor)
        mesh = Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * 3)
        config = dataclasses.replace(qwen3_vl("8b").text, num_hidden_layers=4)
        graph, state = nnx.split(nnx.eval_shape(
            lambda: TextDecoder(config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=dtype)
        ))
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        weights = jax.tree.map(place, state, param_shardings(state, mesh))

        def array(dtype, *shape, axes=()):
            sharding = NamedSharding(mesh, PartitionSpec(*axes))
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        b, g, m, count, page = 32, 4, 32, 8193, 64
        k, axes = config.num_key_value_heads, (None, None, None, "tensor")
        pool = array(dtype, 4, count, 2, k, page, config.head_dim, axes=axes)
        shared = SharedPages(array(jnp.int32, g, m), array(jnp.int32, g, b // g))
        cache = PagedCache(pool, array(jnp.int32, b, m), array(jnp.int32, b, 1), shared)

        def loop(weights, cache, tokens, left):
            text = nnx.merge(graph, weights)

            def body(state):
                step, tokens, cache, active = state
                positions = jnp.broadcast_to(cache.offsets[:, 0], (3, b))
                hidden, cache = text.extend(tokens, positions, cache)
                tokens = jnp.argmax(text.logits(hidden), -1).astype(jnp.int32)
                cache = cache._replace(offsets=jnp.where(active[:, None], cache.offsets + 1, -1))
                return step + 1, tokens, cache, active & (step + 1 < left)

            start = (jnp.int32(0), tokens, cache, left > 0)
            return jax.lax.while_loop(lambda s: (s[0] < 4) & s[3].any(), body, start)[1:3]

        tokens = left = array(jnp.int32, b)
        with jax.set_mesh(mesh):
            lowered = jax.jit(loop, donate_argnums=1).lower(weights, cache, tokens, left)
            compiled = lowered.compile()
        memory, program = compiled.memory_analysis(), compiled.as_text()
        itemsize = dtype.dtype.itemsize
        held = int(np.prod(pool.sharding.shard_shape(pool.shape))) * itemsize
        # What is written, shared pages, and each row's own.
        assert program.count("tpu_custom_call") == 3
        # Temporary memory is smaller than the pages of one layer.
        assert memory.alias_size_in_bytes >= held and memory.temp_size_in_bytes < held / 5
        copies = re.findall(r"= \\w+\\[([0-9,]+)\\]\\S* copy\\(", program)
        sizes = [int(np.prod([int(n) for n in shape.split(",")])) * itemsize for shape in copies]
        assert len(sizes) > 3 and held not in sizes
        print("done")
        """,
        **FOR_TPU,
    )
