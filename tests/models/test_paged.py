"""The paged cache against a dense one: lengths, pauses, the decoder, meshes, the TPU's compiler."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    kernel,
    ref_ragged_paged_attention,
)
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from models.attention import DenseCache, PagedCache, paged
from models.sharding import MESH_AXES
from models.text import KV
from tests.models.program import FOR_TPU, run

# Value of slots that must stay invisible. If seen, it changes every result.
NOISE = 9.0
rng = np.random.default_rng(0)


def draw(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), dtype)


def paged_cache(kv: KV, lengths: np.ndarray, page: int, pages: int) -> PagedCache:
    """A cache with each row's first tokens, on `pages` random pages per row; NOISE elsewhere."""
    layers, b, _, k, h = kv.k.shape
    used = b * pages
    # Five pages belong to no row.
    tables = rng.permutation(used + 5)[:used].reshape(b, pages)
    pool = np.full((layers, used + 5, page, 2 * k, h), NOISE, np.float32)
    for row, length in enumerate(lengths):
        for token in range(length):
            slot = pool[:, tables[row, token // page], token % page]
            slot[:, 0::2] = kv.k[:, row, token]
            slot[:, 1::2] = kv.v[:, row, token]
    return PagedCache(
        jnp.asarray(pool, kv.k.dtype),
        jnp.asarray(tables, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
    )


@functools.partial(jax.jit, donate_argnums=0)
def one_token(cache, layer, q, k, v, active):
    out, cache = cache.attend(layer, q, k, v)
    return out, cache.advance(active)


def test_equals_a_dense_cache():
    """Lengths around a page's border, several steps, and rows that pause."""
    page = 4
    lengths = np.array([0, 1, page - 1, page, page + 1, 2 * page - 1, 2 * page])
    b, n, k, h, steps, layers = len(lengths), 4, 2, 16, 5, 3
    kv = KV(draw(layers, b, 2 * page, k, h), draw(layers, b, 2 * page, k, h))
    cache = paged_cache(kv, lengths, page, 4)
    held = lengths.copy()
    pool = np.asarray(cache.pages).copy()
    valid = np.arange(2 * page) < lengths[:, None]
    dense = DenseCache.prefilled(kv, jnp.asarray(valid), steps)
    # Each row pauses once or never.
    active = np.arange(steps)[:, None] % b != np.arange(b)
    for advancing in active:
        q, new_k, new_v = draw(b, n, h), draw(b, k, h), draw(b, k, h)
        found, cache = one_token(cache, jnp.int32(1), q, new_k, new_v, advancing)
        expected, dense = dense.attend(1, q, new_k, new_v)
        dense = dense.advance(jnp.asarray(advancing))
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
        slots = np.asarray(cache.tables)[np.arange(b), held // page], held % page
        pool[1, *slots] = jnp.stack([new_k, new_v], 2).reshape(b, 2 * k, h)
        held += advancing
    np.testing.assert_array_equal(cache.lengths, held)
    # Other layers, pages and slots did not change.
    np.testing.assert_array_equal(cache.pages, pool)


def test_a_row_with_full_pages_is_not_written():
    kv = KV(draw(2, 2, 8, 1, 8), draw(2, 2, 8, 1, 8))
    cache = paged_cache(kv, np.array([8, 3]), 4, 2)
    pages = np.asarray(cache.pages)
    full = np.asarray(cache.tables)[0]
    active = np.array([False, True])
    out, after = one_token(cache, jnp.int32(0), draw(2, 2, 8), draw(2, 1, 8), draw(2, 1, 8), active)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(np.asarray(after.pages)[:, full], pages[:, full])
    # The other row's new key and value.
    assert (np.asarray(after.pages) != pages).sum() == 2 * 8


@pytest.mark.slow
def test_the_kernels_reference_gives_what_xla_gives(monkeypatch):
    """Runs JAX's reference implementation in the kernel's place, after the kernel's own checks."""
    lengths = np.array([0, 16, 40])
    page = 16
    dtype = jnp.bfloat16
    kv = KV(draw(3, 3, 48, 2, 128, dtype=dtype), draw(3, 3, 48, 2, 128, dtype=dtype))
    token = [draw(3, heads, 128, dtype=dtype) for heads in (4, 2, 2)]
    cache = paged_cache(kv, lengths, page, 3)
    expected, after = cache.attend(jnp.int32(2), *token)
    calls = []

    def reference(*arrays, sm_scale, **blocks):
        kernel.dynamic_validate_inputs(*arrays, sm_scale=sm_scale, **blocks)
        calls.append(blocks)
        return ref_ragged_paged_attention(*arrays, sm_scale=sm_scale)

    monkeypatch.setattr(paged, "ragged_paged_attention", reference)
    monkeypatch.setattr(paged, "platform", lambda: "tpu")
    found, written = cache.attend(jnp.int32(2), *token)
    assert calls == [{"num_kv_pages_per_block": 3, "num_queries_per_block": 3}]
    assert found.dtype == dtype
    wanted = expected.astype(jnp.float32)
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, atol=0.02, rtol=0)
    np.testing.assert_array_equal(written.pages, after.pages)


def abstract_cache(c: int, h: int, dtype) -> PagedCache:
    pages = jax.ShapeDtypeStruct((2, 9, 16, c, h), dtype)
    tables = jax.ShapeDtypeStruct((4, 2), jnp.int32)
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32)
    return PagedCache(pages, tables, lengths)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("c", "h", "dtype", "devices", "expected"),
    [
        (16, 128, jnp.bfloat16, 1, True),
        (16, 128, jnp.bfloat16, 4, True),
        (16, 128, jnp.bfloat16, 8, True),
        # Eight kv heads over 16 devices.
        (16, 128, jnp.bfloat16, 16, False),
        (16, 128, jnp.float32, 8, True),
        (24, 128, jnp.float32, 1, True),
        # Twelve kv heads, in bfloat16.
        (24, 128, jnp.bfloat16, 1, False),
        (6, 128, jnp.float32, 1, False),
        (16, 64, jnp.bfloat16, 1, False),
        (16, 256, jnp.bfloat16, 1, False),
        (16, 128, jnp.float16, 1, False),
    ],
)
def test_what_the_kernel_supports(c, h, dtype, devices, expected):
    cache = abstract_cache(c, h, dtype)
    assert paged.supports(cache.pages, devices) == expected


@pytest.mark.parametrize(
    ("platform", "h", "tensor", "uses"),
    [("tpu", 128, 2, True), ("tpu", 64, 2, False), ("cpu", 128, 2, False)],
)
def test_the_platform_of_the_mesh_chooses_the_kernel(platform, h, tensor, uses):
    cache = abstract_cache(8, h, jnp.bfloat16)
    token = [jax.ShapeDtypeStruct((4, n, h), jnp.bfloat16) for n in (8, 4, 4)]
    device = AbstractDevice(device_kind="any", num_cores=1, platform=platform)
    types = (AxisType.Auto,) * 3
    mesh = AbstractMesh((1, 1, tensor), MESH_AXES, types, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        program = str(jax.make_jaxpr(lambda cache, *token: cache.attend(1, *token))(cache, *token))
    assert "shard_map" in program and ("pallas_call" in program) == uses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "tensor", "dtype"), [("v5e:2x2", 4, "bfloat16"), ("v6e:2x2", 1, "bfloat16")]
)
def test_decoding_compiles_for_tpu_without_a_copy_of_the_pool(topology, tensor, dtype):
    """Four tokens, 32 rows, four layers of the 8B model and half a million tokens of pages."""
    pytest.importorskip("libtpu", reason="the TPU's compiler: pip install -e '.[tpu]'")
    run(
        f"""
        import dataclasses, re
        import jax, jax.numpy as jnp, numpy as np
        from flax import nnx
        from jax.experimental import topologies
        from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
        from models.attention import PagedCache
        from models.qwen3_vl.sizes import qwen3_vl
        from models.text import TextDecoder
        from models.sharding import MESH_AXES, param_shardings

        tensor, dtype = {tensor}, jnp.{dtype}
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

        b, m, count, page = 32, 128, 32769, 16
        c = 2 * config.num_key_value_heads
        axes = (None, None, None, "tensor")
        pool = array(dtype, 4, count, page, c, config.head_dim, axes=axes)
        cache = PagedCache(pool, array(jnp.int32, b, m), array(jnp.int32, b))

        def loop(weights, cache, tokens, left):
            text = nnx.merge(graph, weights)

            def body(state):
                step, tokens, cache, active = state
                positions = jnp.broadcast_to(cache.lengths, (3, b))
                hidden, cache = text.decode(tokens, positions, cache)
                tokens = jnp.argmax(text.logits(hidden), -1).astype(jnp.int32)
                return step + 1, tokens, cache.advance(active), active & (step + 1 < left)

            start = (jnp.int32(0), tokens, cache, left > 0)
            return jax.lax.while_loop(lambda s: (s[0] < 4) & s[3].any(), body, start)[1:3]

        tokens = left = array(jnp.int32, b)
        with jax.set_mesh(mesh):
            lowered = jax.jit(loop, donate_argnums=1).lower(weights, cache, tokens, left)
            compiled = lowered.compile()
        memory, program = compiled.memory_analysis(), compiled.as_text()
        itemsize = dtype.dtype.itemsize
        held = int(np.prod(pool.sharding.shard_shape(pool.shape))) * itemsize
        assert program.count("tpu_custom_call") == 1
        # Temporary memory is smaller than the pages of one layer.
        assert memory.alias_size_in_bytes >= held and memory.temp_size_in_bytes < held / 5
        copies = re.findall(r"= \\w+\\[([0-9,]+)\\]\\S* copy\\(", program)
        sizes = [int(np.prod([int(n) for n in shape.split(",")])) * itemsize for shape in copies]
        assert len(sizes) > 3 and held not in sizes
        print("done")
        """,
        **FOR_TPU,
    )
