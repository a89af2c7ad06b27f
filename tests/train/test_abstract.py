"""A recipe's programs with abstract arguments: equal to a run's, and they compile for TPU."""

from __future__ import annotations

import jax
import pytest

from configs import RECIPES
from models.sharding import make_mesh
from tests.models.program import FOR_TPU, run
from train.learn.sft import SFTBatches
from train.plan.abstract import abstract_sft_update
from train.settings import change


def test_a_recipe_without_the_phase_is_refused():
    run = change(RECIPES["paravt_8b"](), "rl_alone", {"sft": None})
    with pytest.raises(ValueError, match="rl_alone.sft: None"):
        abstract_sft_update(run, make_mesh())


def test_arguments_equal_those_of_a_run(road):
    """Shapes, types and shardings of a real batch and state of the small recipe's cold start."""
    mesh = make_mesh()
    environment = road.environment
    batches = SFTBatches(
        road.run.sft, road.data, None, 0, environment.protocol, environment.features, mesh
    )
    state, _ = batches.start(road.graph, road.fresh())
    batch, _, _ = next(batches)
    arguments = abstract_sft_update(road.run, mesh, road.model.config).arguments
    leaves = zip(jax.tree.leaves((state, batch)), jax.tree.leaves(arguments), strict=True)
    for real, abstract in leaves:
        assert (real.shape, real.dtype) == (abstract.shape, abstract.dtype)
    abstract_state, abstract_batch = arguments
    real_placed = jax.tree.leaves((state, batch.packed))
    abstract_placed = jax.tree.leaves((abstract_state, abstract_batch.packed))
    for real, abstract in zip(real_placed, abstract_placed, strict=True):
        assert real.sharding == abstract.sharding


@pytest.mark.slow
def test_an_update_compiles_for_tpu():
    """Four layers on eight chips, each prompt in four pieces.

    Attention runs in kernels, forward and backward, without whole score matrices. The inputs of
    layers are offloaded to the host.
    """
    pytest.importorskip("libtpu", reason="the TPU's compiler: pip install -e '.[tpu]'")
    printed = run(
        """
        import dataclasses
        from jax.experimental import topologies
        from configs import RECIPES
        from models.qwen3_vl.sizes import qwen3_vl
        from models.sharding import make_mesh
        from train.plan.abstract import abstract_rl_update

        devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
        run, config = RECIPES["paravt_8b"](), qwen3_vl("8b")
        sizes = dict(num_hidden_layers=4, vocab_size=4096, hidden_size=1024, intermediate_size=2048)
        sizes |= dict(num_attention_heads=8, num_key_value_heads=4)
        vision = dataclasses.replace(config.vision, out_hidden_size=1024)
        text = dataclasses.replace(config.text, **sizes)
        config = dataclasses.replace(config, vision=vision, text=text)
        grpo = dataclasses.replace(run.rl.grpo, group_size=4)
        limits = dataclasses.replace(run.protocol, trajectory_tokens=2048, text_tokens=1756)
        changes = dict(prompts=3, microbatches=2, frame_budgets=(4,), remat="offload")
        rl = dataclasses.replace(run.rl, grpo=grpo, **changes)
        run = dataclasses.replace(run, protocol=limits, rl=rl)
        program, arguments = abstract_rl_update(run, make_mesh(2, 4, 1, devices=devices), config)
        compiled = program.lower(*arguments).compile()
        memory = compiled.memory_analysis()
        hlo = compiled.as_text()
        kernels = hlo.count("tpu_custom_call")
        temporary = memory.temp_size_in_bytes
        host = memory.host_temp_size_in_bytes
        print(kernels, "kernels", temporary / 2**20, "MiB, of the host", host / 2**20)
        assert kernels >= 6
        assert "all-to-all" in hlo
        assert host > 0
        # Scores of one row: [heads, suffix, suffix + prompt] in float32 would be 256 MiB.
        assert temporary < 4 * 8 * 2048 * 4048, temporary
        assert memory.alias_size_in_bytes > 0.9 * memory.output_size_in_bytes
        print("done")
        """,
        **FOR_TPU,
    )
    print(printed)
