"""Attention kernels against textbook attention, the choice of kernel, meshes, the TPU's compiler.

What these tests guard:
1. every kernel gives the numbers and gradients of textbook attention;
2. query chunks change nothing, and memory holds one chunk of scores;
3. programs do not grow with length;
4. the right kernel is chosen, and devices give what one device gives.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from models.attention import RowLayout, attend, choose, splash, xla
from models.sharding import MESH_AXES
from tests.models.program import FOR_TPU, run

rng = np.random.default_rng(0)


def textbook(q, k, v, causal=True, segments=None):
    """Softmax over all keys at once, heads repeated."""
    b, t, n, h = q.shape
    kv = k.shape[2]
    segments = jnp.ones((b, t), int) if segments is None else segments
    seen = segments[:, :, None] == segments[:, None]
    if causal:
        seen &= np.tri(t, dtype=bool)[None]
    k = k.repeat(n // kv, 2)
    v = v.repeat(n // kv, 2)
    scores = jnp.where(seen[:, None], jnp.einsum("btnh,bsnh->bnts", q, k) * h**-0.5, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), v)


def case(b, t, n, kv, h, **fields):
    """Arrays (q, k, v), and the fields of a layout."""

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return (draw(b, t, n, h), draw(b, t, kv, h), draw(b, t, kv, h)), fields


def ids(*rows):
    """Segment ids of rows, each given as (segment, length) pairs."""
    return np.stack([np.repeat(*np.transpose(row)) for row in rows]).astype(np.int32)


# Every length needs more than one tile, and is no multiple of one.
CASES = {
"causal": case(2, 150, 4, 2, 64),
"packed": case(
        3, 150, 4, 2, 128,
        segments=ids(
            [(3, 40), (1, 70), (2, 30), (0, 10)], [(0, 9), (1, 141)], [(0, 149), (1, 1)]
        ),
    ),
"packed frames": case(
        1, 140, 2, 2, 72, causal=False, segments=ids([(1, 60), (2, 60), (0, 20)])
    ),
}  # fmt: skip


def results(function, arrays, weight):
    """Output, and the gradients of its weighted sum."""

    def loss(arrays):
        out = function(*arrays)
        return (out.astype(jnp.float32) * weight).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return [out, *jax.tree.leaves(grads)]


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(splash, "BLOCK", 128)


@pytest.mark.parametrize("implementation", ["xla", "splash", "cudnn"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_textbook(small_tiles, name, implementation):
    arrays, options = CASES[name]
    valid = np.ones(arrays[0].shape[:2], bool)
    if "segments" in options:
        valid = options["segments"] != 0
    valid = valid[..., None, None]
    weight = rng.normal(size=arrays[0].shape) * valid

    def ours(q, k, v):
        return attend(q, k, v, RowLayout(**options), implementation)

    found = results(ours, arrays, weight)
    expected = results(functools.partial(textbook, **options), arrays, weight)
    assert np.isfinite(found[0]).all()
    # The outputs of padding mean nothing.
    found[0] = found[0] * valid
    expected[0] = jnp.where(valid, expected[0], 0)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["xla", "splash", "cudnn"])
def test_bfloat16_stays_near_float32(small_tiles, implementation):
    arrays, options = CASES["packed"]
    valid = (options["segments"] != 0)[..., None, None]
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), arrays)
    weight = rng.normal(size=arrays[0].shape) * valid

    def ours(q, k, v):
        return attend(q, k, v, RowLayout(**options), implementation)

    rounded = jax.tree.map(lambda x: x.astype(jnp.float32), low)
    exact = results(functools.partial(textbook, **options), rounded, weight)
    for a, b in zip(results(ours, low, weight), exact, strict=True):
        assert a.dtype == jnp.bfloat16
        a, b = (np.asarray(x, np.float32) * valid for x in (a, b))
        assert np.abs(a - b).mean() < 0.01 * np.abs(b).mean()


@pytest.mark.parametrize("size", [2, 1000])
@pytest.mark.parametrize(
    ("arrays", "options"),
    [
        case(4, 29, 2, 1, 8, segments=ids(*[[(1, 27), (0, 2)]] * 4)),
        case(1, 29, 2, 2, 8, causal=False, segments=ids([(1, 10), (2, 17), (0, 2)])),
    ],
)
def test_tiles_change_nothing(monkeypatch, arrays, options, size):
    """With many tiles, and with one for all."""
    monkeypatch.setattr(xla, "TILE", size)
    monkeypatch.setattr(xla, "LARGE_TILE", size)
    weight = rng.normal(size=arrays[0].shape) * (options["segments"] != 0)[..., None, None]

    def ours(q, k, v):
        return attend(q, k, v, RowLayout(**options), "xla")

    found = results(ours, arrays, weight)
    expected = results(functools.partial(textbook, **options), arrays, weight)
    # The last two queries are padding.
    found[0] = found[0][:, :27]
    expected[0] = expected[0][:, :27]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def whole_pass(options, backward):
    """Attention in XLA, forward only or with gradients."""

    def forward(q, k, v):
        return attend(q, k, v, RowLayout(**options), "xla")

    if not backward:
        return forward
    return jax.grad(lambda *arrays: (forward(*arrays) ** 2).sum(), argnums=(0, 1, 2))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("arrays", "options"), [case(1, 4096, 2, 2, 4), case(2, 4096, 2, 1, 4)])
def test_one_tile_of_scores_is_held_at_a_time(arrays, options, backward):
    """As the compiler reports it. Heads are narrow, so scores make up nearly all of the memory.

    The forward pass holds scores and weights. The backward pass holds weights, their gradients and
    the gradients of scores.
    """
    compiled = jax.jit(whole_pass(options, backward)).lower(*arrays).compile()
    b, t, n, _ = arrays[0].shape
    scores = 4 * b * n * xla.LARGE_TILE * t
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < (3.5 if backward else 2.5) * scores


def mesh_of(platform, *shape):
    device = AbstractDevice(device_kind="any", num_cores=1, platform=platform)
    return AbstractMesh(shape, MESH_AXES, (AxisType.Auto,) * 3, abstract_device=device)


@pytest.mark.parametrize(
    ("platform", "dtype", "t", "h", "mesh", "chosen"),
    [
        ("cpu", jnp.float32, 8, 64, None, "xla"),
        ("tpu", jnp.float32, 7, 72, None, "splash"),
        ("tpu", jnp.float16, 8, 64, None, "xla"),
        ("tpu", jnp.bfloat16, 8, 64, (2, 2, 2), "splash"),
        # Two kv heads are copied for four devices.
        ("tpu", jnp.bfloat16, 8, 64, (1, 1, 4), "splash"),
        # Eight rows do not divide over six devices, nor four heads over eight.
        ("tpu", jnp.bfloat16, 8, 64, (3, 2, 1), "xla"),
        ("tpu", jnp.bfloat16, 8, 64, (1, 1, 8), "xla"),
        ("gpu", jnp.bfloat16, 8, 64, None, "cudnn"),
        ("gpu", jnp.float32, 8, 64, None, "xla"),
        ("gpu", jnp.bfloat16, 8, 256, None, "xla"),
        ("gpu", jnp.bfloat16, 7, 64, None, "xla"),
    ],
)
def test_the_kernel_fits_platform_type_lengths_and_mesh(platform, dtype, t, h, mesh, chosen):
    q, k = (jax.ShapeDtypeStruct((8, t, heads, h), dtype) for heads in (4, 2))
    with jax.sharding.use_abstract_mesh(mesh_of(platform, *(mesh or (1, 1, 1)))):
        assert choose(platform, q, k) == chosen


@pytest.mark.parametrize(("platform", "kernel"), [("tpu", True), ("cpu", False)])
def test_the_platform_of_the_mesh_chooses_the_kernel(platform, kernel):
    x = jax.ShapeDtypeStruct((4, 128, 2, 64), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh_of(platform, 1, 2, 2)):
        program = str(jax.make_jaxpr(attend)(x, x, x))
    assert "shard_map" in program and ("pallas_call" in program) == kernel


@pytest.mark.slow
def test_eight_devices_equal_one():
    """The interpreted TPU kernel, with gradients, with and without a mesh."""
    run(
        """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec
        from models.attention import RowLayout, attend, splash
        from models.sharding import BATCH, make_mesh

        splash.BLOCK = 128
        rng = np.random.default_rng(0)
        draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
        arrays = draw(16, 140, 4, 64), draw(16, 140, 2, 64), draw(16, 140, 2, 64)
        segments = rng.integers(0, 2, (16, 140)).astype(np.int32)

        def loss(arrays, segments):
            out = attend(*arrays, RowLayout(segments), "splash")
            return ((out * segments[..., None, None]) ** 2).sum()

        one = jax.jit(jax.value_and_grad(loss))(arrays, segments)
        for shape in ((2, 2, 2), (1, 8, 1)):
            mesh = make_mesh(*shape)
            with jax.set_mesh(mesh):
                placed = jax.device_put((arrays, segments), NamedSharding(mesh, BATCH))
                many = jax.jit(jax.value_and_grad(loss))(*placed)
            assert len(many[1][0].sharding.device_set) == 8
            for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)
        print("done")
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
    )


@pytest.mark.parametrize(
    ("rows", "pieces", "chosen"), [(4, 1, "xla"), (8, 2, "splash"), (8, 1, "splash"), (4, 2, "xla")]
)
def test_sequences_that_are_fewer_than_devices_need_pieces(rows, pieces, chosen):
    q, k = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 8, 4, 64), (rows, 8, 2, 64))
    )
    with jax.sharding.use_abstract_mesh(mesh_of("tpu", 2, 4, 1)):
        assert choose("tpu", q, k, pieces=pieces) == chosen


@pytest.mark.slow
def test_the_decoder_compiles_for_tpu_with_the_kernel():
    """Forward and gradient for a TPU topology, compiled without a TPU: at least three kernels."""
    pytest.importorskip("libtpu")
    run(
        """
        import jax, jax.numpy as jnp, numpy as np
        from flax import nnx
        from jax.experimental import topologies
        from jax.sharding import AxisType, Mesh, NamedSharding
        from models.config import TextConfig
        from models.attention import RowLayout
        from models.text import TextDecoder
        from models.sharding import BATCH, MESH_AXES, param_shardings

        devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
        mesh = Mesh(np.array(devices).reshape(1, 2, 2), MESH_AXES, axis_types=(AxisType.Auto,) * 3)
        config = TextConfig(
            vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=128, mrope_section=(24, 20, 20),
            rope_theta=10_000.0, tie_word_embeddings=True,
        )
        text = nnx.eval_shape(lambda: TextDecoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
        graph, state = nnx.split(text)
        rows = NamedSharding(mesh, BATCH)
        array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
        b, t = 8, 640
        layout = RowLayout(array(jnp.int32, b, t))
        batch = dict(ids=array(jnp.int32, b, t), layout=layout)

        def loss(state, batch):
            positions = jnp.broadcast_to(jnp.arange(t), (3, b, t))
            hidden, _ = nnx.merge(graph, state)(positions=positions, remat="full", **batch)
            return hidden.astype(jnp.float32).mean()

        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        state = jax.tree.map(place, state, param_shardings(state, mesh))
        with jax.set_mesh(mesh):
            step = jax.jit(jax.value_and_grad(loss))
            compiled = step.lower(state, batch).compile()
        program = compiled.as_text()
        assert program.count("tpu_custom_call") >= 3
        print("done")
        """,
        **FOR_TPU,
    )
