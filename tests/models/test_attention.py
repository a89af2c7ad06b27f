"""Every kernel against textbook attention, which of them is chosen, and the TPU kernel on a mesh and through the TPU's compiler."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from models.attention import QUERY_CHUNK, DenseCache, Shared, attend, choose, splash
from models.sharding import MESH_AXES
from tests.models.program import FOR_TPU, run

rng = np.random.default_rng(0)


def textbook(q, k, v, prefix=None, *, causal=True, segment_ids=None, prefix_mask=None):
    """Softmax over all keys at once, heads and prefix repeated."""
    (b, t, n, h), kv = q.shape, k.shape[2]
    segments = jnp.ones((b, t), int) if segment_ids is None else segment_ids
    if prefix is not None:
        segments = segments != 0
    seen = segments[:, :, None] == segments[:, None]
    if causal:
        seen &= np.tri(t, dtype=bool)
    if prefix is not None:
        p, s = prefix[0].shape[:2]
        valid = np.ones((p, s), bool) if prefix_mask is None else prefix_mask
        k, v = (
            jnp.concatenate([x.repeat(b // p, 0), own], 1)
            for x, own in zip(prefix, (k, v), strict=True)
        )
        seen = jnp.concatenate(
            [jnp.broadcast_to(valid.repeat(b // p, 0)[:, None], (b, t, s)), seen], 2
        )
    k, v = k.repeat(n // kv, 2), v.repeat(n // kv, 2)
    scores = jnp.where(seen[:, None], jnp.einsum("btnh,bsnh->bnts", q, k) * h**-0.5, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), v)


def case(b, t, n, kv, h, *, p=0, s=0, **options):
    """Arrays (q, k, v, prefix) and the options of a case."""
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    prefix = (draw(p, s, kv, h), draw(p, s, kv, h)) if p else None
    return (draw(b, t, n, h), draw(b, t, kv, h), draw(b, t, kv, h), prefix), options


def ids(*rows):
    return np.stack(
        [np.repeat([segment for segment, _ in row], [length for _, length in row]) for row in rows]
    ).astype(np.int32)


# Lengths are no multiple of a tile, and need more than one.
CASES = {
    "causal": case(2, 150, 4, 2, 64),
    "bidirectional": case(1, 134, 2, 2, 72, causal=False),
    "packed": case(1, 150, 4, 1, 128, segment_ids=ids([(3, 40), (1, 70), (2, 30), (0, 10)])),
    "packed frames": case(1, 140, 2, 2, 72, causal=False, segment_ids=ids([(1, 60), (2, 60), (0, 20)])),
    "one row over a prefix": case(1, 20, 2, 2, 64, p=1, s=130),
    "groups over prefixes": case(
        6, 50, 4, 2, 128, p=2, s=90,
        segment_ids=ids([(0, 9), (1, 41)], [(1, 50)], [(1, 12), (0, 38)], [(5, 20), (7, 20), (0, 10)], [(0, 49), (1, 1)], [(1, 50)]),
        prefix_mask=np.arange(90) < np.array([[90], [31]]),
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
    valid = (
        np.ones(arrays[0].shape[:2])
        if "segment_ids" not in options
        else options["segment_ids"] != 0
    )
    weight = rng.normal(size=arrays[0].shape) * valid[..., None, None]

    def ours(q, k, v, prefix):
        return attend(q, k, v, prefix=prefix, implementation=implementation, **options)

    found, expected = (
        results(ours, arrays, weight),
        results(functools.partial(textbook, **options), arrays, weight),
    )
    assert np.isfinite(found[0]).all()
    found[0], expected[0] = (
        found[0] * valid[..., None, None],
        jnp.where(valid[..., None, None], expected[0], 0),
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["xla", "splash", "cudnn"])
def test_bfloat16_stays_near_float32(small_tiles, implementation):
    arrays, options = CASES["groups over prefixes"]
    valid = (options["segment_ids"] != 0)[..., None, None]
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), arrays)
    weight = rng.normal(size=arrays[0].shape) * valid

    def ours(q, k, v, prefix):
        return attend(q, k, v, prefix=prefix, implementation=implementation, **options)

    exact = results(
        functools.partial(textbook, **options),
        jax.tree.map(lambda x: x.astype(jnp.float32), low),
        weight,
    )
    for a, b in zip(results(ours, low, weight), exact, strict=True):
        assert a.dtype == jnp.bfloat16
        a, b = (
            np.asarray(x, np.float32) * (valid if x.shape == valid.shape[:2] + x.shape[2:] else 1)
            for x in (a, jnp.nan_to_num(b))
        )
        assert np.abs(a - b).mean() < 0.01 * np.abs(b).mean()


@pytest.mark.parametrize("implementation", ["xla", "splash", "cudnn"])
def test_under_scan_and_remat(small_tiles, implementation):
    (q, k, v, _), _ = CASES["causal"]

    def layers(attend, q):
        body = jax.checkpoint(
            lambda x, scale: (x + attend(x * scale, k, v), None), prevent_cse=False
        )
        return jax.lax.scan(body, q, jnp.array([0.5, 2.0]))[0]

    ours = functools.partial(attend, implementation=implementation)
    for a, b in zip(
        *(results(functools.partial(layers, f), (q,), 1.0) for f in (ours, textbook)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 2, 4, 1000])
@pytest.mark.parametrize(
    ("arrays", "options"),
    [
        case(4, 29, 2, 1, 8, p=2, s=5, segment_ids=ids(*[[(1, 27), (0, 2)]] * 4)),
        case(1, 29, 2, 2, 8, causal=False, segment_ids=ids([(1, 10), (2, 17), (0, 2)])),
    ],
)
def test_query_chunks_change_nothing(arrays, options, chunk):
    """In loops over chunks, in single chunks, and in one."""
    weight = rng.normal(size=arrays[0].shape) * (options["segment_ids"] != 0)[..., None, None]

    def ours(q, k, v, prefix):
        return attend(q, k, v, prefix=prefix, chunk=chunk, implementation="xla", **options)

    found = results(ours, arrays, weight)
    expected = results(functools.partial(textbook, **options), arrays, weight)
    found[0], expected[0] = found[0][:, :27], expected[0][:, :27]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def whole_pass(options, backward):
    """Attention in XLA, or its gradients with it."""

    def forward(q, k, v, prefix):
        return attend(q, k, v, prefix=prefix, implementation="xla", **options)

    if not backward:
        return forward
    return jax.grad(lambda *arrays: (forward(*arrays) ** 2).sum(), argnums=(0, 1, 2))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("arrays", "options"),
    [
        case(1, 4096, 2, 2, 4),
        case(1, 4096, 2, 2, 4, causal=False),
        case(2, 2048, 2, 1, 4, p=1, s=2048),
    ],
)
def test_one_chunk_of_scores_is_held_at_a_time(arrays, options, backward):
    """By the compiler's own account, where heads are so narrow that scores are nearly all there is.

    The forward pass holds scores and weights; the backward pass weights, their gradients and those
    of the scores.
    """
    compiled = jax.jit(whole_pass(options, backward)).lower(*arrays).compile()
    b, t, n, _ = arrays[0].shape
    keys = t + (0 if arrays[3] is None else arrays[3][0].shape[1])
    scores = 4 * b * n * QUERY_CHUNK * keys
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < (3.5 if backward else 2.5) * scores


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_program_does_not_grow_with_the_length(causal, backward):
    def lines(t: int) -> int:
        arrays, options = case(1, t, 2, 1, 8, causal=causal)
        return len(jax.jit(whole_pass(options, backward)).lower(*arrays).as_text().splitlines())

    assert lines(2048) == lines(16_384)


def test_few_chunks_are_compiled_without_a_loop():
    for t, causal in ((100, True), (432, True), (100, False), (196, False)):
        arrays, options = case(1, t, 2, 1, 8, causal=causal)
        assert "while" not in jax.jit(whole_pass(options, True)).lower(*arrays).as_text()


NOISE = 9.0  # what nobody may see: seen, it would change everything


def dense_cache(k, v, valid, room, prefix=None, seen=None):
    """The second of two layers; the first holds noise."""
    noise = jnp.full((), NOISE)

    def two(x):
        return noise * jnp.ones_like(x), x

    hidden = valid[:, :, None, None]
    kv = jnp.stack(two(jnp.where(hidden, k, NOISE))), jnp.stack(two(jnp.where(hidden, v, NOISE)))
    shared = None
    if prefix is not None:
        shared = Shared.of(
            (jnp.stack(two(prefix[0])), jnp.stack(two(prefix[1]))), jnp.asarray(seen)
        )
    return DenseCache.prefilled(kv, jnp.asarray(valid), room)._replace(shared=shared)


@jax.jit
def one_token(cache, q, k, v, active):
    out, cache = cache.attend(1, q, k, v)
    return out, cache.advance(active)


@pytest.mark.parametrize("shared", [False, True])
def test_one_token_against_a_dense_cache_equals_the_last_of_a_row(shared):
    """Rows of one prompt may see different parts of it, and of their own tokens; one sees nothing but itself."""
    (q, k, v, prefix), _ = case(4, 7, 4, 2, 16, p=2, s=5)
    assert prefix is not None
    own = np.arange(6) >= np.array([[0], [2], [5], [6]])
    seen = np.arange(5) < np.array([[5], [3], [1], [0]])
    given = {"prefix": tuple(x.repeat(2, 0) for x in prefix), "prefix_mask": seen} if shared else {}
    ids = np.concatenate([own, np.ones((4, 1), bool)], 1).astype(np.int32)
    expected = jax.jit(textbook)(q, k, v, segment_ids=ids, **given)[:, -1]
    cache = dense_cache(k[:, :6], v[:, :6], own, 3, *((prefix, seen) if shared else ()))
    found, after = one_token(cache, q[:, -1], k[:, -1], v[:, -1], np.ones(4, bool))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_array_equal(
        after.valid, np.concatenate([own, np.arange(3) < np.ones((4, 1))], 1)
    )
    assert (
        int(after.column) == 7
        and (after.since(0)[0][0, :, :6] == np.where(own[..., None, None], NOISE, 0)).all()
    )


def test_rows_of_a_dense_cache_hold_the_tokens_they_advanced_with():
    """Step after step, some rows pause: what stands in the column that they skipped is never seen, what they held before is."""
    b, n, kv, h, start, steps = 3, 4, 2, 16, 2, 5
    (q, k, v, prefix), _ = case(b, start + steps, n, kv, h, p=1, s=4)
    assert prefix is not None
    seen = np.arange(4) < np.array([[4], [2], [0]])
    active = np.array(
        [[1, 1, 0], [0, 1, 0], [1, 1, 1], [0, 0, 1], [1, 1, 1]], bool
    )  # a row each step
    cache = dense_cache(k[:, :start], v[:, :start], np.ones((b, start), bool), steps, prefix, seen)
    lines, held = (
        tuple(x.repeat(b, 0) for x in prefix),
        np.concatenate([np.ones((b, start), np.int32), active.T], 1),
    )
    whole = jax.jit(textbook)
    for step, going in enumerate(active):
        column = start + step
        # What a row that pauses is fed means nothing.
        new_k, new_v = (jnp.where(going[:, None, None], x[:, column], NOISE) for x in (k, v))
        found, cache = one_token(cache, q[:, column], new_k, new_v, going)
        expected = whole(q, k, v, lines, segment_ids=held, prefix_mask=seen)[:, column]
        np.testing.assert_allclose(found[going], expected[going], atol=1e-5, err_msg=str(step))
        assert np.isfinite(found).all()
    np.testing.assert_array_equal(cache.valid, held == 1)
    for row in range(b):
        own = np.flatnonzero(cache.valid[row])
        for found, expected in zip(cache.since(0), (k, v), strict=True):
            np.testing.assert_array_equal(found[1, row, own], expected[row, own])


@pytest.mark.parametrize(("row", "rows", "prefix"), [(1, 5, 3), (4, 3, 0), (5, 4, 7), (8, 2, 1)])
def test_mask_of_a_group(row, rows, prefix):
    """Computed in tiles, as the kernel does, it is a column for the prefix and a triangle for each row."""
    total = row * rows
    mask = splash.GroupMask(total, prefix + total, prefix, row)
    expected = np.concatenate(
        [np.ones((total, prefix), bool), np.kron(np.eye(rows), np.tri(row)) > 0], 1
    )
    tiles = [
        [mask[slice(i, i + 2), slice(j, j + 3)] for j in range(0, prefix + total, 3)]
        for i in range(0, total, 2)
    ]
    np.testing.assert_array_equal(np.block(tiles), expected)


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
        ("tpu", jnp.bfloat16, 8, 64, (4, 2, 1), "xla"),  # eight devices do not share four groups
        ("tpu", jnp.bfloat16, 8, 64, (1, 1, 4), "xla"),  # nor four devices two heads
        ("gpu", jnp.bfloat16, 8, 64, None, "cudnn"),
        ("gpu", jnp.float32, 8, 64, None, "xla"),
        ("gpu", jnp.bfloat16, 8, 256, None, "xla"),
        ("gpu", jnp.bfloat16, 7, 64, None, "xla"),
    ],
)
def test_choice(platform, dtype, t, h, mesh, chosen):
    q, k, past = (
        jax.ShapeDtypeStruct(shape, dtype) for shape in ((8, t, 4, h), (8, t, 2, h), (4, 10, 2, h))
    )
    with jax.sharding.use_abstract_mesh(mesh_of(platform, *(mesh or (1, 1, 1)))):
        assert choose(platform, q, k, (past, past)) == chosen  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("platform", "kernel"), [("tpu", True), ("cpu", False)])
def test_the_mesh_says_where_it_will_run(platform, kernel):
    x = jax.ShapeDtypeStruct((4, 128, 2, 64), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh_of(platform, 1, 2, 2)):
        program = str(jax.make_jaxpr(attend)(x, x, x))
    assert "shard_map" in program and ("pallas_call" in program) == kernel


def test_a_prefix_without_causality_is_refused():
    (q, k, v, prefix), _ = case(2, 4, 2, 1, 8, p=1, s=3)
    with pytest.raises(ValueError, match="causal = False"):
        attend(q, k, v, causal=False, prefix=prefix)


@pytest.mark.slow
def test_eight_devices_equal_one():
    """The TPU kernel, interpreted, over groups with gradients; the same program where no mesh is set is the measure."""
    run(
        """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec
        from models.attention import splash
        from models.attention import attend
        from models.sharding import BATCH, make_mesh

        splash.BLOCK = 128
        rng = np.random.default_rng(0)
        draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
        arrays = draw(16, 20, 4, 64), draw(16, 20, 2, 64), draw(16, 20, 2, 64), (draw(8, 120, 2, 64), draw(8, 120, 2, 64))
        masks = rng.integers(0, 2, (16, 20)).astype(np.int32), rng.integers(0, 2, (8, 120)) > 0

        def loss(arrays, masks):
            q, k, v, prefix = arrays
            out = attend(q, k, v, segment_ids=masks[0], prefix=prefix, prefix_mask=masks[1], implementation="splash")
            return ((out * masks[0][..., None, None]) ** 2).sum()

        one = jax.jit(jax.value_and_grad(loss))(arrays, masks)
        for shape in ((2, 2, 2), (1, 8, 1)):
            mesh = make_mesh(*shape)
            with jax.set_mesh(mesh):
                many = jax.jit(jax.value_and_grad(loss))(*jax.device_put((arrays, masks), NamedSharding(mesh, BATCH)))
            assert len(many[1][0].sharding.device_set) == 8
            for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)
        print("done")
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
    )


@pytest.mark.parametrize(
    ("prompts", "pieces", "chosen"),
    [(4, 1, "xla"), (8, 2, "splash"), (8, 1, "splash"), (4, 2, "xla")],
)
def test_fewer_prompts_than_devices_lie_in_pieces(prompts, pieces, chosen):
    q, k, past = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((8, 8, 4, 64), (8, 8, 2, 64), (prompts, 10, 2, 64))
    )
    with jax.sharding.use_abstract_mesh(mesh_of("tpu", 2, 4, 1)):
        assert choose("tpu", q, k, (past, past), pieces) == chosen  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_prompts_in_pieces_equal_whole_ones():
    """Heads shared out, kv heads repeated for it, and heads that cannot be: all devices of a prompt then compute them. With gradients."""
    run(
        """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding
        from models.attention import attend
        from models.sharding import BATCH, make_mesh

        rng = np.random.default_rng(0)
        draw = lambda *shape: rng.normal(size=shape).astype(np.float32)

        def loss(arrays, masks, pieces):
            q, k, v, prompt_q, prompt_k, prompt_v = arrays
            prompts = attend(prompt_q, prompt_k, prompt_v, segment_ids=masks[1], pieces=pieces)
            mask = masks[1] > 0
            rows = attend(q, k, v, segment_ids=masks[0], prefix=(prompt_k, prompt_v), prefix_mask=mask, pieces=pieces)
            return ((rows * masks[0][..., None, None]) ** 2).sum() + ((prompts * mask[..., None, None]) ** 3).sum()

        run = jax.jit(jax.value_and_grad(loss), static_argnums=2)
        for p, pieces, n, kv, shape in ((4, 2, 4, 2, (2, 4, 1)), (2, 4, 4, 2, (1, 8, 1)), (1, 8, 4, 2, (2, 4, 1)), (2, 2, 4, 2, (2, 2, 2))):
            arrays = draw(8, 6, n, 8), draw(8, 6, kv, 8), draw(8, 6, kv, 8), draw(p, 16, n, 8), draw(p, 16, kv, 8), draw(p, 16, kv, 8)
            masks = rng.integers(0, 2, (8, 6)).astype(np.int32), (np.arange(16) < rng.integers(5, 17, (p, 1))).astype(np.int32)
            value, gradients = run(arrays, masks, 1)
            cut = lambda x: x if len(x) == 8 else x.reshape(p * pieces, -1, *x.shape[2:])
            mesh = make_mesh(*shape)
            with jax.set_mesh(mesh):
                placed = jax.device_put(jax.tree.map(cut, (arrays, masks)), NamedSharding(mesh, BATCH))
                text = run.lower(*placed, pieces).as_text()
                found, parts = run(*placed, pieces)
            assert ("all_to_all" in text) == (pieces < 8), (p, shape)
            np.testing.assert_allclose(found, value, rtol=1e-4)  # a sum of many terms of either sign
            for a, b in zip(gradients, parts, strict=True):
                np.testing.assert_allclose(b, cut(a), atol=1e-5, rtol=1e-4, err_msg=str((p, shape)))
        print("done")
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
    )


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [0, 4])
def test_the_decoder_compiles_for_tpu_with_the_kernel(prompts):
    """Forward and gradient on a topology that this machine lacks: three kernels, and no score matrix."""
    pytest.importorskip("libtpu")
    run(
        f"""
        import jax, jax.numpy as jnp, numpy as np
        from flax import nnx
        from jax.experimental import topologies
        from jax.sharding import AxisType, Mesh, NamedSharding
        from models.qwen3_vl.config import TextConfig
        from models.qwen3_vl.text import KV, TextDecoder
        from models.sharding import BATCH, MESH_AXES, param_shardings

        devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
        mesh = Mesh(np.array(devices).reshape(1, 2, 2), MESH_AXES, axis_types=(AxisType.Auto,) * 3)
        config = TextConfig(
            vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=128, mrope_section=(24, 20, 20), rope_theta=10_000.0, tie_word_embeddings=True,
        )
        text = nnx.eval_shape(lambda: TextDecoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
        graph, state = nnx.split(text)
        rows = NamedSharding(mesh, BATCH)
        array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
        b, t, p, s = 8, 640, {prompts}, 640
        batch = dict(ids=array(jnp.int32, b, t), segment_ids=array(jnp.int32, b, t))
        if p:
            past = jax.ShapeDtypeStruct((2, p, s, 2, 128), jnp.bfloat16, sharding=NamedSharding(mesh, jax.P(None, *BATCH)))
            batch |= dict(prefix=KV(past, past), prefix_mask=array(jnp.bool, p, s))

        def loss(state, batch):
            positions = jnp.broadcast_to(jnp.arange(t), (3, b, t))
            hidden, _ = nnx.merge(graph, state)(positions=positions, remat="full", **batch)
            return hidden.astype(jnp.float32).mean()

        state = jax.tree.map(lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y), state, param_shardings(state, mesh))
        with jax.set_mesh(mesh):
            compiled = jax.jit(jax.value_and_grad(loss)).lower(state, batch).compile()
        program = compiled.as_text()
        print(program.count("tpu_custom_call"), compiled.memory_analysis().temp_size_in_bytes / 2**20, "MiB")
        assert program.count("tpu_custom_call") >= 3
        print("done")
        """,
        **FOR_TPU,
    )
