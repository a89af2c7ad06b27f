"""Attention in packed rows: shared prompts of several groups, then segments that continue them.

What these tests guard:
1. every kernel gives the numbers and gradients of an explicit mask, over random packed rows;
2. a rollout in a packed row gets what it gets alone behind its prompt;
3. rows in pieces over devices give what one device gives;
4. tiles without any visible pair are skipped, and no others;
5. contradicting arguments are refused.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention import RowLayout, attend, choose, flash, triton, xla
from models.attention.target import visible_tiles
from models.config import TextConfig
from models.text import TextDecoder, VisualBank
from tests.models.program import FOR_TPU, run


def explicit(q, k, v, layout):
    """Softmax over all keys at once under the mask of the rule, heads repeated."""
    t, n, h = q.shape[1:]
    segment_ids, starts, shared = layout.segments, layout.starts, layout.shared
    place = np.arange(t)
    seen = segment_ids[:, :, None] == segment_ids[:, None, :]
    seen &= (place[:, None] >= place[None, :])[None]
    place = place[None, None]
    seen &= (place >= starts[:, :, None]) | (place < shared[:, None, None])
    k = k.repeat(n // k.shape[2], 2)
    v = v.repeat(n // v.shape[2], 2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * h**-0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def packed_rows(t, *rows):
    """The layout of packed rows of t places.

    A row is (prompts, segments), both lists of (group, length).
    """
    segment_ids = np.zeros((len(rows), t), np.int32)
    starts = np.zeros((len(rows), t), np.int32)
    for row, (prompts, segments) in enumerate(rows):
        place = 0
        for group, length in [*prompts, *segments]:
            segment_ids[row, place : place + length] = group
            starts[row, place : place + length] = place
            place += length
        assert place <= t
    shared = [sum(length for _, length in prompts) for prompts, _ in rows]
    return RowLayout(segment_ids, starts=starts, shared=np.array(shared, np.int32))


def random_row(rng, t):
    """Up to four prompts, then segments of these and other groups, in any order, and padding."""
    prompts = [(group, int(rng.integers(1, t // 6))) for group in rng.permutation(5)[1:] + 1]
    prompts = prompts[: rng.integers(0, 5)]
    left = t - sum(length for _, length in prompts) - int(rng.integers(0, t // 4))
    segments = []
    while left > 0:
        length = min(left, int(rng.integers(1, t // 3)))
        segments.append((int(rng.integers(1, 8)), length))
        left -= length
    return prompts, segments


def arrays(rng, b, t, n, kv, h):
    return [jnp.asarray(rng.normal(size=(b, t, heads, h)), jnp.float32) for heads in (n, kv, kv)]


def results(function, qkv, weight):
    """Output, and the gradients of its weighted sum."""

    def loss(qkv):
        out = function(*qkv)
        return (out * weight).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(qkv)
    return [out * (weight != 0), *gradients]


# Segments of two groups alternate; one group has no prompt; the second row begins without prompts.
TWO_ROWS = packed_rows(
    300,
    ([(4, 90), (2, 45)], [(2, 30), (4, 1), (2, 40), (7, 25), (4, 50)]),
    ([], [(1, 140), (2, 3), (3, 100)]),
)


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(flash, "TILE", 128)
    monkeypatch.setattr(triton, "TILE", 32)


@pytest.mark.parametrize("implementation", ["flash", "triton"])
@pytest.mark.parametrize(
    ("length", "size"), [(10, 32), pytest.param(50, 128, marks=pytest.mark.slow)]
)
def test_bfloat16_in_full_tiles_stays_near_float32(implementation, length, size):
    """With a last tile that is padded; heads of 128 are those of an 8B model."""
    row = [(1, 6), (2, 2)], [(1, 3), (2, 1), (1, 5), (3, 1)]
    t = 18 * length + 3
    packing = packed_rows(t, [[(group, n * length) for group, n in part] for part in row])
    rng = np.random.default_rng(6)
    low = [x.astype(jnp.bfloat16) for x in arrays(rng, 1, t, 4, 2, size)]
    valid = (packing.segments != 0)[..., None, None]
    weight = rng.normal(size=low[0].shape) * valid
    ours = functools.partial(attend, layout=packing, implementation=implementation)
    exact = results(
        functools.partial(explicit, layout=packing), [x.astype(jnp.float32) for x in low], weight
    )
    for a, b in zip(results(ours, low, weight), exact, strict=True):
        found, wanted = np.asarray(a, np.float32), np.asarray(b)
        assert np.abs(found - wanted).mean() < 0.01 * np.abs(wanted).mean()


@pytest.mark.parametrize(
    ("implementation", "t", "kv", "trials"),
    [("xla", 97, 1, 8), ("flash", 260, 1, 3), ("triton", 150, 2, 4)],
)
def test_random_packed_rows_equal_the_explicit_mask(
    small_tiles, monkeypatch, implementation, t, kv, trials
):
    monkeypatch.setattr(xla, "TILE", 16)
    rng = np.random.default_rng(1)

    @jax.jit
    def both(qkv, weight, packing):
        ours = functools.partial(attend, layout=packing, implementation=implementation)
        theirs = functools.partial(explicit, layout=packing)
        return [results(function, qkv, weight) for function in (ours, theirs)]

    for trial in range(trials):
        packing = packed_rows(t, *(random_row(rng, t) for _ in range(2)))
        qkv = arrays(rng, 2, t, 2, kv, 8)
        valid = (packing.segments != 0)[..., None, None]
        found, expected = both(qkv, rng.normal(size=qkv[0].shape) * valid, packing)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4, err_msg=str(trial))


def visible_pairs(layout):
    segment_ids, starts, shared = layout.segments, layout.starts, layout.shared
    place = np.arange(segment_ids.shape[1])
    seen = (segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids != 0)[:, None]
    seen &= (place >= starts[:, :, None]) | (place < shared[:, None, None])
    return seen & (place[:, None] >= place)[None]


def any_pair(pairs, queries, keys):
    """Which tiles of queries x keys have a visible pair."""
    b, t, _ = pairs.shape
    return pairs.reshape(b, t // queries, queries, t // keys, keys).any(axis=(2, 4))


def log_normal_row(rng, t, groups, rollouts, mean):
    """A row of prompts and rollouts of log-normal lengths, groups in order."""
    lengths = np.exp(rng.normal(np.log(mean) - 0.32, 0.8, (groups, rollouts + 2))).astype(int) + 1
    prompts = [(group + 1, int(own[-2:].sum())) for group, own in enumerate(lengths)]
    segments = [(group + 1, int(x)) for group, own in enumerate(lengths) for x in own[:-2]]
    return packed_rows(t, (prompts, segments))


@pytest.mark.parametrize("sizes", [(16, 16), (32, 8), (8, 32)])
def test_a_visible_pair_lies_in_a_tile_that_counts(sizes):
    rng = np.random.default_rng(4)
    for trial in range(8):
        packing = packed_rows(96, *(random_row(rng, 96) for _ in range(2)))
        tiles = visible_tiles(jax.tree.map(jnp.asarray, packing), *sizes)
        missed = any_pair(visible_pairs(packing), *sizes) & ~np.asarray(tiles)
        assert not missed.any(), trial


def test_few_tiles_are_computed_in_vain_at_log_normal_lengths():
    """Against the tiles that hold a visible pair, and against all tiles of a causal row."""
    rng = np.random.default_rng(5)
    t, tile = 4096, 64
    packing = log_normal_row(rng, t, groups=4, rollouts=8, mean=80)
    tiles = np.asarray(visible_tiles(jax.tree.map(jnp.asarray, packing), tile, tile))
    needed = any_pair(visible_pairs(packing), tile, tile)
    padding = (packing.segments == 0).reshape(-1, tile).all(axis=1).sum()
    # Tiles of padding only have one tile each, so that no query is without a key.
    assert tiles.sum() - padding <= 1.02 * needed.sum()
    assert tiles.sum() < 0.25 * (t // tile) ** 2 / 2


CONFIG = TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, mrope_section=(4, 2, 2),
    rope_theta=10_000.0, tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.slow
def test_a_rollout_in_a_packed_row_gets_what_it_gets_alone():
    """Two groups with two rollouts each in one row."""
    text = TextDecoder(CONFIG, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(2)
    prompts = {1: 7, 2: 4}
    rollouts = [(1, 5), (2, 3), (1, 2), (2, 6)]
    t = 32
    packing = packed_rows(t, (list(prompts.items()), rollouts))
    ids = rng.integers(0, 64, t)
    positions = np.zeros(t, np.int32)
    # Every second token takes one of five visual vectors.
    index = np.where(np.arange(t) % 2, rng.integers(0, 5, t), -1)
    visual = jnp.asarray(rng.normal(size=(1, 5, 2, 32)), jnp.float32)
    first = {1: 0, 2: 7}
    place = 11
    alone = {}
    for group, length in prompts.items():
        positions[first[group] : first[group] + length] = np.arange(length)
    for group, length in rollouts:
        own = np.arange(place, place + length)
        positions[own] = prompts[group] + np.arange(length)
        alone[place] = np.concatenate([first[group] + np.arange(prompts[group]), own])
        place += length
    packed, _ = nnx.jit(TextDecoder.__call__)(
        text,
        jnp.asarray(ids)[None],
        jnp.broadcast_to(jnp.asarray(positions), (3, 1, t)),
        layout=packing,
        visual=VisualBank(visual, jnp.asarray(index)[None]),
    )
    packed = packed.reshape(t, -1)
    for place, places in alone.items():
        row, _ = text(
            jnp.asarray(ids[places])[None],
            jnp.broadcast_to(jnp.asarray(positions[places]), (3, 1, len(places))),
            visual=VisualBank(visual, jnp.asarray(index[places])[None]),
        )
        np.testing.assert_allclose(packed[places], row[0], atol=2e-5, err_msg=str(place))


@pytest.mark.parametrize(
    ("platform", "packed"), [("tpu", "flash"), ("gpu", "triton"), ("cpu", "xla")]
)
def test_the_kernel_of_packed_rows_fits_the_platform(platform, packed):
    q, k = (jax.ShapeDtypeStruct((1, 8, heads, 64), jnp.bfloat16) for heads in (4, 2))
    assert choose(platform, q, k, packed=True) == packed


@pytest.mark.parametrize(("h", "dtype"), [(72, jnp.bfloat16), (64, jnp.float32)])
def test_packed_rows_that_no_gpu_kernel_takes_go_to_xla(h, dtype):
    q, k = (jax.ShapeDtypeStruct((1, 8, heads, h), dtype) for heads in (4, 2))
    assert choose("gpu", q, k, packed=True) == "xla"


@pytest.mark.usefixtures("unchecked")
def test_a_packing_that_contradicts_itself_is_refused():
    qkv = arrays(np.random.default_rng(0), 2, 300, 2, 1, 8)
    no_starts, both_ways = (
        dataclasses.replace(TWO_ROWS, **change) for change in ({"starts": None}, {"causal": False})
    )
    for layout in (no_starts, both_ways):
        with pytest.raises(ValueError, match="layout: packed rows need"):
            attend(*qkv, layout=layout)
    with pytest.raises(ValueError, match="layout: 2 pieces per sequence, 2 in all; set a mesh"):
        attend(*qkv, layout=dataclasses.replace(TWO_ROWS, pieces=2))


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "length"), [("v5e:4x4", 65_536), ("v6e:4x4", 8_192)])
def test_a_packed_row_over_16_devices_compiles_for_tpu(topology, length):
    """Forward and gradient in pieces, compiled without a TPU: 2 of 32 heads per device."""
    pytest.importorskip("libtpu")
    run(
        f"""
        import jax, jax.numpy as jnp, numpy as np
        from jax.experimental import topologies
        from jax.sharding import AxisType, Mesh, NamedSharding
        from models.attention import RowLayout, attend
        from models.sharding import BATCH, MESH_AXES

        devices = topologies.get_topology_desc(platform="tpu", topology_name="{topology}").devices
        mesh = Mesh(np.array(devices).reshape(1, 16, 1), MESH_AXES, (AxisType.Auto,) * 3)
        rows = NamedSharding(mesh, BATCH)
        t = {length} // 16

        def array(dtype, *shape):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

        q, k = (array(jnp.bfloat16, 16, t, heads, 128) for heads in (32, 8))
        places = array(jnp.int32, 16, t)

        def loss(qkv, layout):
            return attend(*qkv, layout=layout).astype(jnp.float32).sum()

        with jax.set_mesh(mesh):
            step = jax.jit(jax.value_and_grad(loss))
            shared = array(jnp.int32, 16)
            layout = RowLayout(places, starts=places, shared=shared, pieces=16)
            lowered = step.lower((q, k, k), layout)
            for kernel in ("forward", "d_queries", "d_keys"):
                assert "packed_attention_" + kernel in lowered.as_text()
            lowered.compile()
        print("done")
        """,
        **FOR_TPU,
    )


@pytest.mark.slow
def test_packed_rows_in_pieces_equal_whole_ones():
    """With gradients. Heads divide over the pieces, or kv heads are repeated."""
    run(
        """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding
        import dataclasses
        from models.attention import attend, xla
        from models.sharding import BATCH, make_mesh
        from tests.models.test_packed_attention import packed_rows, random_row

        xla.TILE = 8
        rng = np.random.default_rng(0)
        draw = lambda *shape: rng.normal(size=shape).astype(np.float32)

        def loss(qkv, packing, pieces):
            out = attend(*qkv, layout=dataclasses.replace(packing, pieces=pieces))
            valid = (packing.segments != 0)[..., None, None]
            return (out * valid * jnp.arange(1, 9)[None, None, None]).sum()

        run = jax.jit(jax.value_and_grad(loss), static_argnums=2)
        cases = (  # rows, pieces, query heads, kv heads, mesh
            (4, 2, 4, 2, (2, 4, 1)), (1, 8, 8, 8, (1, 8, 1)), (1, 8, 8, 2, (2, 4, 1)),
            (2, 2, 4, 2, (2, 2, 2)), (8, 1, 4, 2, (1, 8, 1)),
        )
        for b, pieces, n, kv, shape in cases:
            qkv = draw(b, 96, n, 8), draw(b, 96, kv, 8), draw(b, 96, kv, 8)
            packing = packed_rows(96, *(random_row(rng, 96) for _ in range(b)))
            value, gradients = run(qkv, packing, 1)
            whole = lambda x: x.reshape(b * pieces, -1, *x.shape[2:])
            cut = lambda x: x.repeat(pieces) if x.ndim == 1 else whole(x)
            mesh = make_mesh(*shape)
            with jax.set_mesh(mesh):
                placed = jax.device_put(
                    jax.tree.map(cut, (qkv, packing)), NamedSharding(mesh, BATCH)
                )
                text = run.lower(*placed, pieces).as_text()
                found, parts = run(*placed, pieces)
            assert ("all_to_all" in text) == (pieces > 1), (b, shape)
            np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-3)
            for x, y in zip(gradients, parts, strict=True):
                np.testing.assert_allclose(y, cut(x), atol=1e-4, rtol=1e-4, err_msg=str((b, n)))
        print("done")
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
    )
