"""A recipe's programs with abstract arguments: equal to a run's, and they compile for TPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest

from configs import RECIPES
from models.sharding import make_mesh
from paravt_extras.plan.abstract import abstract_rl_step, abstract_sft_step
from tests.models.program import FOR_TPU, run
from tests.train.steps import skeleton_of
from train.learn.packing import StepRoom
from train.learn.placement import Bank
from train.learn.rl_batch import lay_out_padding
from train.learn.sft import SFTBatches, make_sft_updater
from train.settings import change


def test_a_recipe_without_the_phase_is_refused():
    run = change(RECIPES["paravt_8b"](), "rl_alone", {"sft": None})
    with pytest.raises(ValueError, match="rl_alone.sft: None"):
        abstract_sft_step(run, make_mesh())


def test_arguments_equal_those_of_a_run(road):
    """Shapes, types and shardings of a real batch and state of the small recipe's cold start.

    The plan knows no data: it has room for rows of nothing but visual tokens.
    """
    mesh = make_mesh()
    batches = SFTBatches(road.run.sft, road.data, None, 0, road.environment, mesh)
    updater = make_sft_updater(skeleton_of(road), road.fresh(), road.run.sft, batches.shape)
    step = next(batches)
    planned = abstract_sft_step(road.run, mesh, road.model.config)
    rows, room, *vector = step.bank.cached.shape
    bank: Any = planned.bank.cached
    assert (rows, *vector) == (bank.shape[0], *bank.shape[2:]) and 0 < room <= bank.shape[1]
    known = Bank(bank.update(shape=step.bank.cached.shape))
    require_same(
        (updater.start, step.bank, step.microbatches[:1], step.batch),
        (planned.state, known, planned.microbatches, planned.batch),
    )


def require_same(real: Any, planned: Any) -> None:
    """Equal shapes, types and shardings."""
    assert jax.tree.structure(real) == jax.tree.structure(planned)
    for x, y in zip(jax.tree.leaves(real), jax.tree.leaves(planned), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), (x.sharding, y.sharding)


@pytest.mark.parametrize("subagents", [0.0, 0.5])
def test_arguments_equal_those_of_an_rl_step(road, subagents):
    """Shapes and types of micro-batches of every size, and of what the loss reads besides."""
    rl = dataclasses.replace(road.run.rl, subagents_per_rollout=subagents)
    run = dataclasses.replace(road.run, rl=rl)
    sizes = run.rl_shape.microbatches(rl.microbatch_tokens, devices=1, pieces=1)
    laid_out = lay_out_padding(StepRoom(run.rl_shape, sizes), road.environment.features)
    # One device of one process: nothing is padded to the number of devices.
    step = abstract_rl_step(run, make_mesh(1, 1, 1), road.model.config)
    real = (laid_out.microbatches, laid_out.visual[None], laid_out.grpo)
    abstract = (step.microbatches, step.visual, step.batch.grpo)
    assert jax.tree.structure(real) == jax.tree.structure(abstract)
    for x, y in zip(jax.tree.leaves(real), jax.tree.leaves(abstract), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


@pytest.mark.slow
def test_shardings_equal_those_of_placed_arrays():
    """On a mesh of eight devices: an update's batches are placed as the plan says."""
    printed = run(
        """
        import pathlib
        import jax, numpy as np
        from configs import RECIPES
        from models.features import FrameFeatures
        from models.sharding import make_mesh
        from paravt_jax.data import video
        from tests.train.test_abstract import require_same
        from train.learn.conversation_rows import lay_out_rows
        from train.learn.placement import BankPlacer, VisualRoom, place, place_whole
        from train.learn.packing import StepRoom
        from train.learn.rl_batch import lay_out_padding
        from train.learn.sft import SFTBatch
        from paravt_extras.plan.abstract import abstract_rl_step, abstract_sft_step
        from paravt_extras.plan.programs import planned_config

        recipe = RECIPES["paravt_tiny"]()
        config, mesh = planned_config(recipe), make_mesh(2, 4, 1)
        step, shape = abstract_rl_step(recipe, mesh, config), recipe.rl_shape
        sizes = shape.microbatches(recipe.rl.microbatch_tokens, 8, step.microbatches[0].pieces)
        features = FrameFeatures(None, config, recipe.frames, pathlib.Path(), source=video)
        padding = lay_out_padding(StepRoom(shape, sizes, 8), features)
        bank = BankPlacer(mesh, VisualRoom(shape.slots(1, 8)), None)(padding.visual, ())
        microbatches = tuple(place_whole(part, mesh) for part in padding.microbatches)
        grpo = place(padding.grpo, mesh)
        require_same((bank, microbatches, grpo), (step.bank, step.microbatches, step.batch.grpo))

        step = abstract_sft_step(recipe, mesh, config)
        shape = recipe.sft.shape.fitted(recipe.sft.microbatches, 8)
        own = lay_out_rows([], features, shape, devices=8)
        bank = BankPlacer(mesh, shape.room(8), None)(own.visual, own.grids)
        microbatches = tuple(place(part, mesh) for part in own.microbatches[:1])
        batch = place(SFTBatch(own.mask, np.float32(0)), mesh)
        require_same((bank, microbatches, batch), (step.bank, step.microbatches, step.batch))
        print("done")
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
    print(printed)


@pytest.mark.slow
def test_an_update_compiles_for_tpu():
    """Four layers on eight chips: gradients of one packed row in eight pieces.

    Attention runs in the kernels of packed rows, without whole score matrices. The inputs of layers
    are offloaded to the host. The sum of the gradients overwrites the one before.
    """
    pytest.importorskip("libtpu", reason="the TPU's compiler: pip install -e '.[tpu]'")
    printed = run(
        """
        import collections
        import dataclasses
        import re
        from jax.experimental import topologies
        from configs import RECIPES
        from models.qwen3_vl.sizes import qwen3_vl
        from models.sharding import make_mesh
        from paravt_extras.plan.abstract import abstract_rl_step

        devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
        run, config = RECIPES["paravt_8b"](), qwen3_vl("8b")
        sizes = dict(num_hidden_layers=4, vocab_size=4096, hidden_size=1024, intermediate_size=2048)
        sizes |= dict(num_attention_heads=8, num_key_value_heads=4)
        vision = dataclasses.replace(config.vision, out_hidden_size=1024)
        text = dataclasses.replace(config.text, **sizes)
        config = dataclasses.replace(config, vision=vision, text=text)
        grpo = dataclasses.replace(run.rl.grpo, group_size=4)
        limits = dataclasses.replace(run.protocol, trajectory_tokens=1024, text_tokens=1756)
        changes = dict(prompts=3, microbatch_tokens=4096, frame_budgets=(4,), remat="offload")
        rl = dataclasses.replace(run.rl, grpo=grpo, **changes)
        run = dataclasses.replace(run, protocol=limits, rl=rl)
        mesh = make_mesh(1, 8, 1, devices=devices)
        program, arguments = abstract_rl_step(run, mesh, config).gradients()
        batch = arguments[3]
        assert batch.pieces == 8 and batch.ids.shape == (8, 512)
        compiled = program.lower(*arguments).compile()
        memory = compiled.memory_analysis()
        hlo = compiled.as_text()
        calls = re.findall("%packed_attention_([a-z_]+)[.0-9]* = .*tpu_custom_call", hlo)
        kernels = collections.Counter(calls)
        temporary = memory.temp_size_in_bytes
        host = memory.host_temp_size_in_bytes
        print(kernels, temporary / 2**20, "MiB, of the host", host / 2**20)
        # Two loops over layers, with and without visual vectors. Offloading repeats the forward
        # pass of attention.
        assert kernels == {"forward": 4, "d_queries": 2, "d_keys": 2}, kernels
        assert hlo.count('custom_call_target="tpu_custom_call"') == kernels.total()
        assert "all-to-all" in hlo
        assert host > 0
        # A device has one of 8 heads. Its scores in float32 would be 64 MiB.
        assert temporary < 4 * 4096 * 4096 / 2, temporary
        assert memory.alias_size_in_bytes > 0.9 * memory.output_size_in_bytes
        print("done")
        """,
        **FOR_TPU,
    )
    print(printed)
