"""A recipe's programs with shapes for arrays: they lie as a run's would, and the compiler for TPU takes them."""

from __future__ import annotations

import jax
import pytest

from configs import RECIPES
from models.sharding import make_mesh
from tests.models.program import FOR_TPU, run
from train.learn.sft import SFTBatches
from train.plan.abstract import abstract_sft_update


def test_a_recipe_without_the_phase_is_refused():
    with pytest.raises(ValueError, match="paravt_8b.sft: None; give a recipe with this phase"):
        abstract_sft_update(RECIPES["paravt_8b"](), make_mesh())


def test_arguments_are_what_a_run_gives(road):
    """Shapes, types and places of the small recipe's cold start: a batch and a state that were really made."""
    settings, mesh = road.run.sft, make_mesh()
    batches = SFTBatches(
        settings, road.data, None, 0, road.environment.protocol, road.environment.features, mesh
    )
    state, _ = batches.start(road.graph, road.fresh())
    batch, _, _ = next(batches)
    abstract = abstract_sft_update(road.run, mesh, road.model.config).arguments
    for real, shape in zip(jax.tree.leaves((state, batch)), jax.tree.leaves(abstract), strict=True):
        assert (real.shape, real.dtype) == (shape.shape, shape.dtype)
    for real, shape in zip(
        jax.tree.leaves((state, batch.packed)),
        jax.tree.leaves((abstract[0], abstract[1].packed)),
        strict=True,
    ):
        assert real.sharding == shape.sharding


@pytest.mark.slow
def test_an_update_compiles_for_tpu():
    """Four layers on eight chips, prompts in four pieces each: attention is the kernel's, forward and back, no scores are whole, and
    layers' inputs wait in the host's memory."""
    pytest.importorskip("libtpu", reason="the TPU's compiler: pip install -e '.[tpu]'")
    printed = run(
        """
        import dataclasses
        from jax.experimental import topologies
        from configs import RECIPES
        from models.qwen3_vl.config import qwen3_vl
        from models.sharding import make_mesh
        from train.plan.abstract import abstract_rl_update

        devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
        run, config = RECIPES["paravt_8b"](), qwen3_vl("8b")
        sizes = dict(num_hidden_layers=4, vocab_size=4096, hidden_size=1024, intermediate_size=2048)
        sizes |= dict(num_attention_heads=8, num_key_value_heads=4)
        vision = dataclasses.replace(config.vision, out_hidden_size=1024)
        config = dataclasses.replace(config, vision=vision, text=dataclasses.replace(config.text, **sizes))
        grpo = dataclasses.replace(run.rl.grpo, group_size=4)
        limits = dataclasses.replace(run.protocol, trajectory_tokens=2048, text_tokens=1756)
        rl = dataclasses.replace(run.rl, prompts=3, grpo=grpo, microbatches=2, frame_budgets=(4,), remat="offload")
        run = dataclasses.replace(run, protocol=limits, rl=rl)
        program, arguments = abstract_rl_update(run, make_mesh(2, 4, 1, devices=devices), config)
        compiled = program.lower(*arguments).compile()
        memory, text = compiled.memory_analysis(), compiled.as_text()
        kernels, temporary, host = text.count("tpu_custom_call"), memory.temp_size_in_bytes, memory.host_temp_size_in_bytes
        print(kernels, "kernels", temporary / 2**20, "MiB, of the host", host / 2**20)
        assert kernels >= 6 and "all-to-all" in text and host > 0
        # Scores of one row: [heads, suffix, suffix + prompt] in float32 would be 256 MiB.
        assert temporary < 4 * 8 * 2048 * 4048, temporary
        assert memory.alias_size_in_bytes > 0.9 * memory.output_size_in_bytes
        print("done")
        """,
        **FOR_TPU,
    )
    print(printed)
