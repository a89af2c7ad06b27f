"""GPUs: the share of memory that JAX takes, types, and attention lowered for one without one."""

from __future__ import annotations

import os
import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from models.attention import RowLayout, attend
from models.devices import require_type, reserve_memory
from models.sharding import MESH_AXES

NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
B, T, N, K, H = 2, 64, 4, 2, 128


def device(kind: str, capability: str, platform: str = "gpu") -> types.SimpleNamespace:
    return types.SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)


@pytest.mark.parametrize("name", [None, *NAMES])
def test_a_share_of_memory_that_is_set_stays(name, monkeypatch):
    for each in NAMES:
        monkeypatch.delenv(each, raising=False)
    if name is not None:
        monkeypatch.setenv(name, "0.5")
    reserve_memory()
    found = {each: os.environ[each] for each in NAMES if each in os.environ}
    assert found == ({NAMES[0]: "0.9"} if name is None else {name: "0.5"})
    monkeypatch.delenv(NAMES[0], raising=False)


def test_bfloat16_is_refused_on_gpus_before_ampere_only():
    with pytest.raises(ValueError, match=r"model\.dtype: bfloat16 on Tesla T4.*7\.5.*tiny recipes"):
        require_type("model.dtype", "bfloat16", device("Tesla T4", "7.5"))
    require_type("model.dtype", "float32", device("Tesla T4", "7.5"))
    require_type("model.dtype", "bfloat16", device("NVIDIA L4", "8.9"))
    require_type("model.dtype", "bfloat16", device("NVIDIA B200", "10.0"))
    require_type("model.dtype", "bfloat16", device("AMD Instinct MI250X", "gfx90a"))
    require_type("model.dtype", "bfloat16", jax.local_devices()[0])


def text_for_cuda(function, *arrays) -> str:
    """The program of a function for a GPU of CUDA. None has to be here."""
    gpu = AbstractDevice(device_kind="NVIDIA H100", num_cores=1, platform="gpu")
    mesh = AbstractMesh((1, 1, 1), MESH_AXES, (AxisType.Auto,) * 3, abstract_device=gpu)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(*arrays)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def cudnn(monkeypatch):
    """JAX asks the installed library for its version."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91002)


def arrays(dtype) -> list[jax.ShapeDtypeStruct]:
    """Queries, keys, values and segments."""
    floats = [jax.ShapeDtypeStruct((B, T, heads, H), dtype) for heads in (N, K, K)]
    return [*floats, jax.ShapeDtypeStruct((B, T), jnp.int32)]


def packed_conversations(q, k, v, segments):
    return attend(q, k, v, RowLayout(segments))


def test_attention_in_bfloat16_is_one_call_of_cudnn_on_a_gpu(cudnn):
    text = text_for_cuda(packed_conversations, *arrays(jnp.bfloat16))
    assert re.findall(r"__cudnn\$\w+", text) == ["__cudnn$fmhaScaleBiasSoftmax"]


def test_the_gradient_of_attention_is_that_of_cudnn(cudnn):
    def loss(*inputs):
        return packed_conversations(*inputs).astype(jnp.float32).sum()

    text = text_for_cuda(jax.grad(loss), *arrays(jnp.bfloat16))
    assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in text


def test_packed_rows_and_their_gradient_are_three_kernels():
    def loss(q, k, v, places, shared):
        layout = RowLayout(places, starts=places, shared=shared)
        return attend(q, k, v, layout).astype(jnp.float32).sum()

    q, k, v, places = arrays(jnp.bfloat16)
    shared = jax.ShapeDtypeStruct((B,), jnp.int32)
    text = text_for_cuda(jax.grad(loss, (0, 1, 2)), q, k, v, places, shared)
    names = re.findall(r'name = "packed_attention_(\w+)"', text)
    assert names == ["forward", "d_queries", "d_keys"]
