"""The plan lowers the programs of a run with shapes alone, and says whether they fit a TPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from configs import RECIPES
from models.sharding import make_mesh
from paravt_extras.plan import (
    PlannedModel,
    bytes_read,
    main,
    reference_lowerings,
    rl_step,
    sft_step,
)
from tests.models.program import FOR_TPU, run
from tests.train.steps import road_learner, skeleton_of
from train.learn.placement import Bank
from train.learn.rl_settings import RLSettings
from train.learn.sft import SFTBatches, make_sft_updater


def require_same(real: Iterable[Any], planned: Iterable[Any]) -> None:
    """Require the same programs, with equal shapes, types and shardings."""
    for one, other in zip(real, planned, strict=True):
        program, planned_program = one.func.__self__, other.func.__self__
        name = program.jitted.__name__
        assert name == planned_program.jitted.__name__
        arguments = (program.first, one.args), (planned_program.first, other.args)
        first, second = map(jax.tree.structure, arguments)
        assert first == second, name
        for x, y in zip(*map(jax.tree.leaves, arguments), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype), name
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim), (name, x.sharding, y.sharding)


def require_same_cold_start(road: Any, **axes: int) -> None:
    """The plan knows no data: it has room for rows of nothing but visual tokens."""
    mesh = make_mesh(axes.get("data", 1), axes.get("fsdp", 1), axes.get("tensor", 1))
    settings = road.run.sft
    batches = SFTBatches(settings, road.data, None, 0, road.environment, mesh)
    skeleton, weights = skeleton_of(road, **axes), road.fresh(**axes)
    updater = make_sft_updater(skeleton, weights, settings, batches.shape)
    step = next(batches)
    rows = [(step.microbatches[0], step.mask)]
    real = updater.lowerings(updater.initial, step.bank, rows)
    planned = sft_step(PlannedModel.of(road.run, mesh, road.model.config))
    bank: Any = planned.bank.cached
    shape = step.bank.cached.shape
    assert (shape[0], *shape[2:]) == (bank.shape[0], *bank.shape[2:])
    assert 0 < shape[1] <= bank.shape[1]
    known = dataclasses.replace(planned, bank=Bank(bank.update(shape=shape)))
    require_same(real, known.lowerings)


def require_same_rl(road: Any, settings: RLSettings, **axes: int) -> None:
    """Micro-batches of every size, what the loss reads besides, and the reference."""
    run = dataclasses.replace(road.run, rl=settings)
    learner = road_learner(road, settings, run.rl_shape, **axes)
    real = learner.lowerings(learner.initial, road.environment.features)
    planned = PlannedModel.of(run, learner.mesh, road.model.config)
    step = rl_step(planned)
    require_same(real, [*step.lowerings, *reference_lowerings(planned, step)])


def test_the_plan_has_the_programs_of_a_run(road):
    require_same_cold_start(road)
    require_same_rl(road, road.run.rl)
    require_same_rl(road, dataclasses.replace(road.run.rl, updates_per_batch=2))


@pytest.mark.slow
def test_the_plan_has_the_programs_of_a_run_on_eight_devices():
    run(
        """
        import pathlib, tempfile
        from tests.train import small, test_plan
        road = small.build_road(pathlib.Path(tempfile.mkdtemp()))
        for axes in ({"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4}):
            test_plan.require_same_cold_start(road, **axes)
            test_plan.require_same_rl(road, road.run.rl, **axes)
        print("done")
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )


@pytest.mark.slow
def test_an_update_compiles_for_tpu():
    """Four layers on eight chips: gradients of one packed row in eight pieces.

    Attention runs in the kernels of packed rows, without whole score matrices. The inputs of layers
    are offloaded to the host. The sum of the gradients overwrites the one before.
    """
    pytest.importorskip("libtpu", reason="the TPU's compiler: pip install -e '.[tpu]'")
    run(
        """
        import collections, dataclasses, re
        from jax.experimental import topologies
        from configs import RECIPES
        from models.qwen3_vl.sizes import qwen3_vl
        from models.sharding import make_mesh
        from paravt_extras.plan import PlannedModel, rl_step

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
        update = next(rl_step(PlannedModel.of(run, mesh, config)).lowerings)
        batch = update.args[3]
        assert batch.pieces == 8 and batch.ids.shape == (8, 512)
        compiled = update().compile()
        memory = compiled.memory_analysis()
        hlo = compiled.as_text()
        calls = re.findall("%packed_attention_([a-z_]+)[.0-9]* = .*tpu_custom_call", hlo)
        kernels = collections.Counter(calls)
        temporary = memory.temp_size_in_bytes
        # Two loops over layers, with and without visual vectors. Offloading repeats the forward
        # pass of attention.
        assert kernels == {"forward": 4, "d_queries": 2, "d_keys": 2}, kernels
        assert hlo.count('custom_call_target="tpu_custom_call"') == kernels.total()
        assert "all-to-all" in hlo
        assert memory.host_temp_size_in_bytes > 0
        # A device has one of 8 heads. Its scores in float32 would be 64 MiB.
        assert temporary < 4 * 4096 * 4096 / 2, temporary
        assert memory.alias_size_in_bytes > 0.9 * memory.output_size_in_bytes
        print("done")
        """,
        **FOR_TPU,
    )


@pytest.mark.slow
def test_programs_of_the_smallest_recipe_with_adapters_compile_and_fit():
    pytest.importorskip("libtpu", reason="the TPU's compiler: pip install -e '.[tpu]'")
    arguments = ["--config=paravt_2b_lora", "--topology=v5e:1x1", "--only=RL apply,RL weight_sync"]
    program = f"from paravt_extras.plan import main; assert not main({arguments}); print('done')"
    lines = run(program, **FOR_TPU).splitlines()
    assert "9.58 GB per token" in lines[1]
    assert lines[-3].endswith("RL weight_sync") and lines[-2].startswith("fits: 15.75 GiB")


def test_what_a_token_of_the_longest_rollouts_reads():
    weights = {"layers": jnp.zeros(3), "embedding": jnp.zeros(10)}
    residents = {"engine's weights": weights, "engine's base": {}}
    residents["KV pool"] = jnp.zeros((1, 9, 2, 5, 64, 1))
    # The second of four hosts has 2, 8 and 4 rollouts of three prompts.
    numbers = 3 + 10 * (3 * 5120 + 14 * 8192 // 2)
    assert bytes_read(RECIPES["paravt_8b"](), residents, hosts=4) == 4 * numbers
    # The embeddings are the head, too.
    numbers = 3 + 10 + 10 * (4 * 5120 + 32 * 2048 // 2)
    assert bytes_read(RECIPES["paravt_2b_lora"](), residents, hosts=1) == 4 * numbers


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "topology = ''"),
        (["--topology=v5e:3"], "v5e:3"),
        (["--topology=v5e:4x4", "--mesh.fsdp", "8", "--mesh.tensor", "1"], "mesh: "),
    ],
)
def test_a_mistake_is_one_line(arguments, words, capsys):
    assert main(["--config=paravt_8b", *arguments]) == 2
    message = capsys.readouterr().err.strip()
    assert words in message and "\n" not in message
