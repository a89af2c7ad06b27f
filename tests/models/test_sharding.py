"""The mesh changes where numbers lie and never which they are; what cannot be laid out is named."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from models.qwen3_vl import abstract_model, qwen3_vl, tiny
from models.sharding import RULES, make_mesh, param_shardings


def state(config=None):
    return nnx.state(abstract_model(config or tiny(96)), nnx.Param)


def specs(config, **mesh):
    shardings = param_shardings(state(config), jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh)))
    return {"/".join(map(str, path)): variable.get_value().spec for path, variable in nnx.to_flat_state(shardings)}


def test_every_parameter_of_8b_has_a_place():
    found = specs(qwen3_vl("8b"), data=1, fsdp=16, tensor=4)
    assert found["text/layers/q"] == PartitionSpec(None, "fsdp", "tensor", None)
    assert found["text/head"] == PartitionSpec("tensor", "fsdp")
    assert found["vision/blocks/down/kernel"] == PartitionSpec(None, "tensor", "fsdp")


def test_one_device_holds_everything():
    shardings = param_shardings(state(), make_mesh())
    assert all(s.mesh.size == 1 for s in jax.tree.leaves(shardings, is_leaf=lambda x: isinstance(x, jax.sharding.Sharding)))


@pytest.mark.parametrize(
    ("rules", "vocab", "message"),
    [
        ({**RULES, "mlp": "fsdp"}, 96, "text/layers/down: axes 'mlp' and 'embed' both go to mesh axis 'fsdp'"),
        (RULES, 97, "text/embedding: axis 'vocab' of size 97 does not divide over 2 devices of mesh axis 'tensor'"),
        ({k: v for k, v in RULES.items() if k != "heads"}, 96, "axis 'heads' has no rule; add it"),
    ],
)
def test_what_cannot_be_laid_out_is_named(rules, vocab, message):
    mesh = jax.sharding.AbstractMesh((1, 2, 2), ("data", "fsdp", "tensor"))
    with pytest.raises(ValueError, match=message):
        param_shardings(state(tiny(vocab)), mesh, rules)


def test_a_mesh_larger_than_the_machine_is_refused():
    with pytest.raises(ValueError, match="mesh = 1 x 4096 x 1"):
        make_mesh(fsdp=4096)


@pytest.mark.slow
def test_eight_devices_equal_one():
    """Loss and gradients of a shared-prefix batch, in a process with eight fake devices."""
    program = textwrap.dedent("""
        import jax, numpy as np
        from flax import nnx
        from jax.sharding import NamedSharding, PartitionSpec
        from models.qwen3_vl import Qwen3VL, frame_layout, tiny
        from models.sharding import BATCH, make_mesh, param_shardings

        assert len(jax.devices()) == 8
        model = Qwen3VL(tiny(96), rngs=nnx.Rngs(0))
        graph, state = nnx.split(model, nnx.Param)
        rng = np.random.default_rng(0)
        batch = {"prompt": rng.integers(0, 96, (4, 12)), "ids": rng.integers(0, 96, (8, 6))}
        batch["patches"] = rng.normal(size=(4, 4, 1536)).astype(np.float32)

        def loss(state, batch):
            model = nnx.merge(graph, state)
            visual = model.vision(batch["patches"], frame_layout((2, 2), model.config.vision))
            index = np.full((4, 12), -1); index[:, 5] = 0
            where = lambda a, b, n: np.broadcast_to(np.arange(a, b), (3, n, b - a))
            _, prefix = model.text(batch["prompt"], where(0, 12, 4), visual=visual, visual_index=index)
            hidden, _ = model.text(batch["ids"], where(12, 18, 8), prefix=prefix, remat=True)
            return model.text.token_logprobs(hidden[:, :-1], batch["ids"][:, 1:], 0.7, 2).mean()

        step = jax.jit(jax.value_and_grad(loss))
        one = step(state, batch)
        for shape in ((2, 2, 2), (1, 4, 2), (4, 2, 1)):
            mesh = make_mesh(*shape)
            placed = jax.device_put(state, param_shardings(state, mesh))
            rows = NamedSharding(mesh, BATCH if shape[0] * shape[1] == 4 else PartitionSpec("data"))
            many = step(placed, jax.device_put(batch, rows))
            assert len(many[0].sharding.device_set) == 8
            np.testing.assert_allclose(one[0], many[0], atol=1e-5)
            for a, b in zip(jax.tree.leaves(one[1]), jax.tree.leaves(many[1]), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(np.abs(a).max())), rtol=0)
        print("equal")
    """)
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr[-4000:]
