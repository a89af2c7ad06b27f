"""A mesh changes no number; errors for parameters that cannot be sharded."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from models.config import ExpertsConfig, ModelConfig, TextConfig
from models.model import VisionLanguageModel, abstract_model
from models.qwen3_vl.config import Qwen3VLVisionConfig
from models.qwen3_vl.sizes import qwen3_vl, tiny
from models.qwen3_vl_moe.family import Qwen3VLMoeConfig
from models.sharding import BATCH, make_mesh, param_shardings
from models.text import TextDecoder, VisualBank
from tests.collectives import bytes_sent, find_collectives
from tests.processes import on_eight_devices


def state(config=None):
    return nnx.state(abstract_model(config or tiny(96)), nnx.Param)


def specs(config, **mesh):
    abstract = jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh))
    shardings = param_shardings(state(config), abstract)
    return {
        "/".join(map(str, path)): variable.get_value().spec
        for path, variable in nnx.to_flat_state(shardings)
    }


@pytest.mark.parametrize("size", ["8b", "32b"])
def test_every_parameter_of_a_published_size_has_a_sharding(size):
    found = specs(qwen3_vl(size), data=1, fsdp=16, tensor=4)
    assert found["text/layers/q"] == PartitionSpec(None, "fsdp", "tensor", None)
    assert found["text/embedding"] == PartitionSpec("tensor", "fsdp")
    assert found["vision/blocks/down/kernel"] == PartitionSpec(None, "tensor", "fsdp")
    whole = [name for name, spec in found.items() if not any(spec)]
    assert all("norm" in name for name in whole), "only norms are whole on every device"


def test_odd_widths_and_scarce_kv_heads_are_whole():
    found = specs(qwen3_vl("8b"), data=1, fsdp=256, tensor=16)
    assert found["text/layers/q"] == PartitionSpec(None, "fsdp", "tensor", None)
    # Eight kv heads for 16 devices, and a tower of width 1,152 for 256.
    assert found["text/layers/k"] == PartitionSpec(None, "fsdp", None, None)
    assert found["vision/blocks/out/kernel"] == PartitionSpec(None, "tensor", None)
    # What the mergers join is wider.
    assert found["vision/merger/fc1/kernel"] == PartitionSpec("fsdp", "tensor")


def test_a_parameter_that_cannot_be_sharded_is_named():
    mesh = jax.sharding.AbstractMesh((1, 2, 2), ("data", "fsdp", "tensor"))
    message = "text/embedding: axis 'vocab' of size 97 .*2 devices .*'tensor'"
    with pytest.raises(ValueError, match=message):
        param_shardings(state(tiny(97)), mesh)


def test_a_mesh_larger_than_the_machine_is_refused():
    with pytest.raises(ValueError, match="mesh = 1 x 4096 x 1"):
        make_mesh(fsdp=4096)


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    slice_index: int
    platform: str


# The processes of two slices, as they may join.
TWO_SLICES = [FakeDevice(n, n // 4, n // 4 % 2, "tpu") for n in range(16)]


def test_every_replica_lies_in_one_slice():
    mesh = make_mesh(data=2, fsdp=8, devices=TWO_SLICES)
    for number, replica in enumerate(mesh.devices):
        assert {device.slice_index for device in replica.flat} == {number}


def test_a_replica_in_several_slices_is_refused():
    devices = TWO_SLICES
    with pytest.raises(ValueError, match="mesh = 1 x 16 x 1 .* divisor of the 8 devices"):
        make_mesh(fsdp=16, devices=devices)
    with pytest.raises(ValueError, match="mesh = 4 x 1 x 3 .* several slices"):
        make_mesh(data=4, tensor=3, devices=devices)
    with pytest.raises(ValueError, match="slices"):
        make_mesh(data=2, fsdp=6, devices=devices)


@pytest.mark.slow
def test_eight_devices_equal_one():
    """Loss and gradients of a model with experts, with eight fake devices.

    Runs this file as a program, since the number of devices is fixed when JAX starts.
    """
    on_eight_devices(__file__)


VISION = Qwen3VLVisionConfig(
    hidden_size=32,
    depth=2,
    num_heads=8,
    intermediate_size=64,
    out_hidden_size=64,
    num_position_embeddings=9,
    deepstack_visual_indexes=(0,),
    patch_size=4,
)
TEXT = TextConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=8,
    mrope_section=(2, 1, 1),
    rope_theta=10_000.0,
    tie_word_embeddings=False,
)


def make_batch() -> dict[str, Any]:
    """Eight rows of 18 tokens, two of them visual, with images of different sizes."""
    rng = np.random.default_rng(0)
    index = np.full((8, 18), -1)
    index[:, [4, 5]] = [0, 1]
    return {
        "ids": rng.integers(0, 96, (8, 18)),
        "index": index,
        "patches": rng.normal(size=(8, 16, VISION.patch_dim)).astype(np.float32),
        "grids": np.array([(2, 4), (4, 4), (4, 2), (2, 6)] * 2),
    }


def spots(tokens: int, rows: int) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens), (3, rows, tokens))


def loss(model: VisionLanguageModel, batch: dict[str, Any]) -> jax.Array:
    visual = model.vision(batch["patches"], batch["grids"])
    bank = VisualBank(visual, batch["index"])
    hidden, _ = model.text(batch["ids"], spots(18, 8), visual=bank, remat="full")
    logprobs = model.text.token_logprobs(hidden[:, :-1], batch["ids"][:, 1:], 0.7, 2)
    return -logprobs.mean()


def gradients_of(state, graph, batch: dict[str, Any]):
    """Loss and gradients."""
    return jax.value_and_grad(lambda state: loss(nnx.merge(graph, state), batch))(state)


def main() -> None:
    experts = dataclasses.replace(TEXT, experts=ExpertsConfig(8, 3, 24))
    compare(Qwen3VLMoeConfig(VISION, experts))
    check_that_saved_states_are_sharded_over_tensor()


def compare(config: ModelConfig) -> None:
    """A model on some meshes with the same model on one device."""
    graph, state = nnx.split(VisionLanguageModel(config, rngs=nnx.Rngs(0)), nnx.Param)
    run = jax.jit(lambda state, batch: gradients_of(state, graph, batch))
    batch = make_batch()
    value, gradients = jax.tree.map(np.asarray, run(state, batch))
    for shape in ((1, 1, 8), (2, 2, 2)):
        mesh = make_mesh(*shape)
        placed = jax.device_put(state, param_shardings(state, mesh))
        with jax.set_mesh(mesh):
            many = run(placed, jax.device_put(batch, NamedSharding(mesh, BATCH)))
        assert len(many[0].sharding.device_set) == 8
        np.testing.assert_allclose(many[0], value, atol=1e-5, err_msg=str(shape))
        for (path, one), other in zip(
            jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(many[1]), strict=True
        ):
            bound = 1e-5 * max(1.0, np.abs(one).max())
            np.testing.assert_allclose(other, one, atol=bound, rtol=0, err_msg=f"{shape} {path}")


def check_that_saved_states_are_sharded_over_tensor() -> None:
    """Two devices share a row of 16 tokens: each saves half of its six layers' inputs."""
    mesh = make_mesh(1, 4, 2)
    config = dataclasses.replace(TEXT, num_hidden_layers=6)
    graph, state = nnx.split(nnx.eval_shape(lambda: TextDecoder(config, rngs=nnx.Rngs(0))))
    placed = jax.tree.map(
        lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y),
        state,
        param_shardings(state, mesh),
    )
    ids = jax.ShapeDtypeStruct((4, 16), jnp.int32, sharding=NamedSharding(mesh, BATCH))

    @jax.grad
    def gradient(state, ids):
        return nnx.merge(graph, state)(ids, spots(16, 4), remat="full")[0].sum()

    with jax.set_mesh(mesh):
        program = str(jax.jit(gradient).lower(placed, ids).compile().as_text())
    assert "f32[6,1,8,64]" in program and "f32[6,1,16,64]" not in program
    # 1.8 MB. It would be 2.8 MB if the products were sharded like the saved states.
    assert bytes_sent(find_collectives(program, 8)) < 2.2e6


if __name__ == "__main__":
    main()
