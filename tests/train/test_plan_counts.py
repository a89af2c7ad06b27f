"""FLOPs against hand counts and the model's formula; collectives against known programs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import P
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from models.flops import flops_per_token, vision_flops
from models.model import abstract_model
from models.qwen3_vl.sizes import tiny
from models.sharding import MESH_AXES
from models.vision import frame_layout
from paravt_extras.plan.collectives import bytes_sent, find_collectives
from paravt_extras.plan.flops import causal, count_flops, every, pairs_of_rows
from tests.models.program import run

TPU = AbstractDevice(device_kind="any", num_cores=1, platform="tpu")
CONFIG = tiny(97)
TEXT = dataclasses.replace(
    CONFIG, text=dataclasses.replace(CONFIG.text, head_dim=128, mrope_section=(24, 20, 20))
)


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def once(x, w):
    return jnp.tanh(x @ w)


def twice(x, w):
    return once(once(x, w), w)


def in_a_scan(x, w):
    return jax.lax.scan(lambda x, _: (once(x, w), None), x, None, length=7)[0]


def in_branches(x, w):
    return jax.lax.cond(x[0, 0] > 0, lambda x: twice(x, w), lambda x: once(x, w), x)


def in_a_while_loop(x, w):
    return jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: once(x, w), x)


def with_gradient_and_remat(x, w):
    return jax.value_and_grad(lambda x: jax.checkpoint(twice)(x, w).sum())(x)


def with_an_unused_result(x, w):
    _ = twice(x, w)
    return once(x, w)


def mapped(x, w):
    return jax.vmap(once, (None, 0))(x, jnp.stack([w, w, w]))


def jitted(x, w):
    return jax.jit(once)(x, w) + x.sum()


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (once, 1),
        (in_a_scan, 7),
        (in_branches, 2),
        (in_a_while_loop, 5),
        # Two products: forward, forward again, backward.
        (with_gradient_and_remat, 6),
        (with_an_unused_result, 1),
        (mapped, 3),
        (jitted, 1),
    ],
)
def test_products_count_as_often_as_they_run(program, expected):
    traced = jax.make_jaxpr(program)(array(6, 8), array(8, 8))
    assert count_flops(traced, trip_count=5) == expected * 2 * 6 * 8 * 8


def test_a_shard_map_counts_on_every_device():
    mesh = AbstractMesh((2, 4), ("a", "b"), (AxisType.Auto,) * 2, abstract_device=TPU)
    with jax.sharding.use_abstract_mesh(mesh):
        sharded = jax.shard_map(once, in_specs=(P("a"), P()), out_specs=P("a"), check_vma=False)
        traced = jax.make_jaxpr(sharded)(array(6, 8), array(8, 8))
    # Two halves along "a", each computed by all four devices along "b".
    assert count_flops(traced) == 4 * 2 * 6 * 8 * 8


def on_tpu():
    """Traces for a TPU, where attention is a kernel."""
    mesh = AbstractMesh((1, 1, 1), MESH_AXES, (AxisType.Auto,) * 3, abstract_device=TPU)
    return jax.sharding.use_abstract_mesh(mesh)


def test_convolutions_and_unknown_kernels_are_refused():
    def convolve(x, w):
        return jax.lax.conv(x, w, (1,), "SAME")

    convolution = jax.make_jaxpr(convolve)(array(1, 1, 8), array(1, 1, 3))
    with pytest.raises(ValueError, match="convolution"):
        count_flops(convolution)
    with on_tpu():
        kernel = decoder(256)
    with pytest.raises(ValueError, match="'splash_mha_fwd"):
        count_flops(kernel)


def decoder(tokens: int, rows: int = 2):
    graph, weights = nnx.split(abstract_model(TEXT).text)

    def forward(weights, ids, positions):
        text = nnx.merge(graph, weights)
        return text.logits(text(ids, positions)[0])

    return jax.make_jaxpr(forward)(
        weights, array(rows, tokens, dtype=jnp.int32), array(3, rows, tokens, dtype=jnp.int32)
    )


def test_the_decoder_counts_as_its_formula_says():
    # On CPU, 128 queries at a time attend to all keys up to the last of them: 192 on average.
    assert count_flops(decoder(256)) == 2 * 256 * flops_per_token(TEXT, 192)
    # On TPU the kernel computes only what the causal mask shows.
    with on_tpu():
        traced = decoder(256)
    assert count_flops(traced, pairs=causal) == 2 * 256 * flops_per_token(TEXT, 257 / 2)


def test_the_tower_counts_as_its_formula_says():
    graph, weights = nnx.split(abstract_model(CONFIG).vision)
    layout = frame_layout((4, 6), CONFIG.vision)
    traced = jax.make_jaxpr(lambda weights, patches: nnx.merge(graph, weights)(patches, layout))(
        weights, array(3, 24, CONFIG.vision.patch_dim)
    )
    expected = 3 * vision_flops(CONFIG.vision, 24)
    assert count_flops(traced, pairs=every) == pytest.approx(expected, rel=1e-12)


def test_pairs_of_rows_behind_a_prompt():
    # Two rows of three tokens behind a prompt of four, which both see.
    assert pairs_of_rows(3)(6, 10) == 2 * (3 * 4 + (1 + 2 + 3))
    # The prompt itself, which is longer than a row.
    assert pairs_of_rows(3)(4, 4) == causal(4, 4) == 10
    assert every(2, 5) == 10


@pytest.mark.parametrize(
    ("remat", "products"), [("none", 2), ("full", 4), ("attention", 2), ("dots", 2)]
)
def test_a_backward_pass_through_the_kernel_counts_seven_products(remat, products):
    """The forward pass counts two, or twice two if full remat repeats it."""
    text = abstract_model(TEXT).text
    c = TEXT.text
    t = 256
    graph, weights = nnx.split(text)

    def loss(weights, ids, positions):
        return nnx.merge(graph, weights)(ids, positions, remat=remat)[0].sum()

    ids = array(1, t, dtype=jnp.int32)
    positions = array(3, 1, t, dtype=jnp.int32)
    with on_tpu():
        traced = jax.make_jaxpr(jax.value_and_grad(loss))(weights, ids, positions)
    attention = count_flops(traced, pairs=causal) - count_flops(traced, pairs=lambda q, k: 0.0)
    one = 2.0 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * causal(t, t)
    assert attention == pytest.approx((products + 4 + 3) * one)


@pytest.mark.parametrize(("remat", "forward"), [("full", 4), ("attention", 2), ("dots", 2)])
def test_packed_rows_count_per_pair_of_their_kernels(remat, forward):
    """Two products forward, and seven backward: three for queries, and four for keys and values."""
    graph, weights = nnx.split(abstract_model(TEXT).text)
    c = TEXT.text
    t = 256

    def loss(weights, ids, positions, segments, starts, shared):
        text = nnx.merge(graph, weights)
        rows = {"segment_ids": segments, "starts": starts, "shared": shared}
        return text(ids, positions, remat=remat, **rows)[0].sum()

    row = array(1, t, dtype=jnp.int32)
    arguments = (row, array(3, 1, t, dtype=jnp.int32), row, row, array(1, dtype=jnp.int32))
    with on_tpu():
        traced = jax.make_jaxpr(jax.value_and_grad(loss))(weights, *arguments)
    # The number of pairs depends on what is packed, and not on the shapes.
    without, one = (count_flops(traced, pairs=lambda q, k, n=n: n) for n in (0.0, 1.0))
    pair = 2.0 * c.num_hidden_layers * c.num_attention_heads * c.head_dim
    assert one - without == (forward + 7) * pair
    assert without == count_flops(traced, pairs=causal) - (forward + 7) * pair * causal(t, t)


HLO = """
%condition (state: (s32[], f32[4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(9)
  %state = (s32[]{:T(128)}, f32[4]{0}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %lt = pred[] compare(%at, %limit), direction=LT
}

%body (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %old = (s32[]{:T(128)}, f32[4]{0}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%old), index=0
  %here = s32[]{:T(128)S(6)} copy(%count)
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%here, %one), metadata={op_name="jit(f)/while/body/add"}
  %x = f32[4]{0:T(128)} get-tuple-element(%old), index=1
  %start = (f32[4]{0:T(128)}, f32[16]{0:T(128)}, u32[]{:S(2)}) all-gather-start(%x), \
replica_groups=[2,4]<=[8], dimensions={0}
  %done = f32[16]{0:T(128)} all-gather-done(%start)
  %part = f32[16]{0} all-gather(%x), replica_groups=[2,4]<=[8], \
backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
  ROOT %out = (s32[], f32[4]) tuple(%next, %x)
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %zero = s32[]{:T(128)} constant(2)
  %copy = s32[]{:T(128)} copy(%zero)
  %a = f32[4]{0} parameter(0)
  %tuple = (s32[], f32[4]) tuple(%copy, %a)
  %while = (s32[]{:T(128)}, f32[4]{0}) while(%tuple), condition=%condition, body=%body
  %reduce = f32[4]{0} all-reduce(%a), replica_groups=mesh['x'=2,'y'=4] {'y':(1)2}, to_apply=%add
  ROOT %permute = f32[4]{0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}
}
"""


@pytest.mark.parametrize(
    ("groups", "slices", "between"),
    [
        # Eight devices in two slices of four, or in four of two.
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 2, False),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4, True),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", 2, True),
        ("replica_groups=[2,4]<=[8]", 2, False),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2, True),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", 2, False),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", 4, True),
        ("replica_groups=mesh['x'=2,'y'=4] {'y'}", 2, False),
        ("replica_groups=mesh['x'=2,'y'=4] {'x'}", 2, True),
        ("replica_groups=mesh['x'=2,'y'=4] {'y':(2)2}", 4, False),
        ("replica_groups=mesh['x'=2,'y'=4] {'y':(1)2}", 4, True),
        ("replica_groups={}", 2, True),
    ],
)
def test_a_collective_between_slices(groups, slices, between):
    (found,) = find_collectives(
        f"""
ENTRY %main (a: f32[4]) -> f32[4] {{
  %a = f32[4]{{0}} parameter(0)
  ROOT %reduce = f32[4]{{0}} all-reduce(%a), {groups}, to_apply=%add
}}
""",
        8,
        slices=slices,
    )
    assert found.between == between


def test_what_a_program_of_several_slices_hands_to_the_host():
    (found,) = find_collectives(
        """
ENTRY %main (a: f32[4,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0:T(8,128)} parameter(0)
  %token = token[] after-all()
  %send = (f32[4,8]{1,0}, u32[]{:S(2)}, token[]) send(%a, %token), channel_id=2, \
is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",\
_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[4,8]{1,0}, u32[]{:S(2)}, token[]) recv(%token), channel_id=1, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
}
""",
        16,
    )
    assert (found.kind, found.sent, found.between) == ("DCN", 128, True)


def test_collectives_of_a_written_program():
    """Seven iterations (from 2 to 9) of an all-gather of 16 bytes among four devices, with a part
    written twice; an all-reduce between two devices; a permutation."""
    found = bytes_sent(find_collectives(HLO, 8))
    assert found == {"all-gather": 7 * 3 * 16, "all-reduce": 2 * 16 / 2, "collective-permute": 16}


@pytest.mark.parametrize(
    ("first", "step", "end", "trips"),
    [(0, 1, 9, 9), (0, 2, 8, 4), (2, 2, 9, 4), (3, 4, 16, 4), (9, 1, 9, 0), (12, 2, 9, 0)],
)
def test_the_trip_count_follows_from_the_counter(first, step, end, trips):
    """XLA writes two steps of a ring into one iteration, whose counter then grows by two."""
    hlo = HLO.replace("constant(2)", f"constant({first})")
    hlo = hlo.replace("constant(1)", f"constant({step})").replace("constant(9)", f"constant({end})")
    found = bytes_sent(find_collectives(hlo, 8))
    assert found["all-gather"] == trips * 3 * 16


def test_a_counter_may_grow_by_several_additions():
    more = "  %more = s32[] add(%next, %one)\n  ROOT %out = (s32[], f32[4]) tuple(%more, %x)"
    hlo = HLO.replace("  ROOT %out = (s32[], f32[4]) tuple(%next, %x)", more)
    hlo = hlo.replace("add(%here, %one)", "add(%one, %here)")
    assert bytes_sent(find_collectives(hlo, 8))["all-gather"] == 4 * 3 * 16


def test_an_unknown_start_counts_as_0():
    hlo = HLO.replace("%copy = s32[]{:T(128)} copy(%zero)", "%copy = s32[]{:T(128)} parameter(1)")
    assert bytes_sent(find_collectives(hlo, 8))["all-gather"] == 9 * 3 * 16


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("direction=LT", "direction=NE"),
        ("%limit = s32[]{:T(128)} constant(9)", "%limit = s32[]{:T(128)} parameter(1)"),
        ("%one = s32[]{:T(128)} constant(1)", "%one = s32[]{:T(128)} parameter(1)"),
        ("add(%here, %one)", "multiply(%here, %one)"),
        ("tuple(%next, %x)", "tuple(%count, %x)"),
    ],
)
def test_a_loop_with_an_unknown_trip_count_is_refused(old, new):
    unknown = HLO.replace(old, new)
    assert unknown != HLO
    with pytest.raises(ValueError, match="loop body .*trip_count"):
        find_collectives(unknown, 8)
    assert bytes_sent(find_collectives(unknown, 8, trip_count=3))["all-gather"] == 3 * 3 * 16


def test_collectives_of_compiled_programs():
    """Weights gathered layer by layer in a scan, and every kind of collective, on eight devices."""
    run(
        """
        import jax, jax.numpy as jnp
        from jax import P
        from jax.sharding import AxisType
        from paravt_extras.plan.collectives import bytes_sent, find_collectives

        mesh = jax.make_mesh((2, 4), ("a", "b"), (AxisType.Auto,) * 2)

        def sent_by(function, in_specs, out_specs, *arguments):
            mapped = jax.shard_map(
                function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
            )
            compiled = jax.jit(mapped).lower(*arguments).compile()
            return bytes_sent(find_collectives(compiled.as_text(), 8))

        def layers(x, ws):
            def layer(x, w):
                return jnp.tanh(x @ jax.lax.all_gather(w, "b", tiled=True)), None
            return jax.lax.scan(layer, x, ws)[0]

        specs = P("a"), P(None, "b")
        sent = sent_by(layers, specs, P("a"), jnp.ones((16, 64)), jnp.ones((5, 64, 64)))
        assert sent == {"all-gather": 5 * 3 / 4 * 64 * 64 * 4}, sent

        def kinds(x):
            total = jax.lax.psum(x, "b")
            ring = jax.lax.ppermute(x, "a", [(0, 1), (1, 0)])
            scattered = jax.lax.psum_scatter(x, "b", tiled=True)
            swapped = jax.lax.all_to_all(x, "b", 1, 0, tiled=True)
            return total + ring, scattered, swapped

        specs = P("a"), P(("a", "b")), P(("a", "b"))
        sent = sent_by(kinds, P("a"), specs, jnp.ones((16, 64)))
        own = 8 * 64 * 4
        expected = {
            "all-reduce": 2 * 3 / 4 * own,
            "collective-permute": own,
            "reduce-scatter": 3 / 4 * own,
            "all-to-all": 3 / 4 * own,
        }
        assert sent == expected, (sent, expected)
        print("done")
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
