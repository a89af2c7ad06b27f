"""The published sizes, without allocating weights: names, shapes, counts, and FLOPs per token."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from models.attention import DenseCache
from models.flops import flops_per_token, vision_flops
from models.model import abstract_model, num_params
from models.qwen3_vl.sizes import qwen3_vl
from models.text import KV
from models.vision import frame_layout
from models.weights import hf_layout
from models.weights.hf_config import from_hf, to_hf

# From transformers 5.23 on the meta device: number of tensors and of parameters, and the digest of
# the sorted lines `name shape`.
TRANSFORMERS = {
    "2b": (625, 2_127_532_032, "ef1403e368249df3"),
    "4b": (713, 4_437_815_808, "19a1dcfe9dcddddb"),
    "8b": (750, 8_767_123_696, "f4b5b35bbb33c17c"),
    "32b": (1058, 33_357_390_064, "252bdcd17674d554"),
}
SIZES = tuple(TRANSFORMERS)


def summary(shapes: dict[str, tuple[int, ...]]) -> tuple[int, int, str]:
    lines = "\n".join(f"{name} {list(shapes[name])}" for name in sorted(shapes))
    return (
        len(shapes),
        sum(map(math.prod, shapes.values())),
        hashlib.sha256(lines.encode()).hexdigest()[:16],
    )


@pytest.mark.parametrize("size", SIZES)
def test_names_shapes_and_counts_are_the_recorded_ones(size):
    found = summary(hf_layout.tensor_shapes(qwen3_vl(size)))
    assert found == TRANSFORMERS[size]
    assert found[1] == num_params(qwen3_vl(size))


@pytest.mark.parametrize("size", ["2b", "4b", "8b"])
def test_presets_are_the_published_config_files(assets, size):
    assert from_hf(assets / "qwen3_vl" / f"config_{size}.json") == qwen3_vl(size)


def their_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    torch = pytest.importorskip("torch", reason="the oracle; install the extra parity")
    import transformers

    with torch.device("meta"):
        model = transformers.Qwen3VLForConditionalGeneration(
            transformers.Qwen3VLConfig.from_dict(config)
        )
    # Tied parameters come once.
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parity
@pytest.mark.parametrize("size", SIZES)
def test_names_and_shapes_equal_transformers(size):
    theirs = their_shapes(to_hf(qwen3_vl(size)))
    assert hf_layout.tensor_shapes(qwen3_vl(size)) == theirs
    assert summary(theirs) == TRANSFORMERS[size]


@pytest.mark.parity
@pytest.mark.parametrize("size", ["2b", "4b", "8b"])
def test_names_and_shapes_of_the_config_files_equal_transformers(assets, size):
    content = json.loads((assets / "qwen3_vl" / f"config_{size}.json").read_text())
    assert hf_layout.tensor_shapes(from_hf(content)) == their_shapes(content)


def matmul_flops(jaxpr: Any) -> int:
    """FLOPs of all matrix products in a program; a product in a scan counts once per step."""
    total = 0
    for step in jaxpr.eqns:
        if step.primitive.name == "dot_general":
            (contracted, _), _ = step.params["dimension_numbers"]
            left = step.invars[0].aval.shape
            outputs = math.prod(step.outvars[0].aval.shape)
            total += 2 * outputs * math.prod(left[axis] for axis in contracted)
        times = step.params.get("length", 1) if step.primitive.name == "scan" else 1
        total += times * sum(matmul_flops(inner) for inner in jaxprs_in_params(step.params))
    return total


@pytest.mark.parametrize("size", SIZES)
def test_flops_of_a_token_equal_those_of_the_decoding_program(size):
    config = qwen3_vl(size)
    b, s = 3, 500
    c = config.text

    def decode(model, kv):
        cache = DenseCache.prefilled(kv, jnp.ones((b, s - 1), bool), 1)
        hidden, cache = model.text.decode(np.zeros(b, int), np.zeros((3, b), int), cache)
        return model.text.logits(hidden), cache

    shape = jax.ShapeDtypeStruct(
        (c.num_hidden_layers, b, s - 1, c.num_key_value_heads, c.head_dim), jnp.float32
    )
    program = jax.make_jaxpr(decode)(abstract_model(config), KV(shape, shape))  # pyright: ignore[reportArgumentType]
    assert matmul_flops(program.jaxpr) == b * flops_per_token(config, s)


@pytest.mark.parametrize("size", SIZES)
def test_flops_of_a_frame_equal_those_of_the_encoding_program(size):
    config = qwen3_vl(size)
    b = 3
    grid = (6, 10)
    c = config.vision
    shape: Any = jax.ShapeDtypeStruct((b, grid[0] * grid[1], c.patch_dim), jnp.float32)
    layout = frame_layout(grid, c)
    program = jax.make_jaxpr(lambda tower, patches: tower(patches, layout))(
        abstract_model(config).vision, shape
    )
    assert matmul_flops(program.jaxpr) == b * vision_flops(c, grid[0] * grid[1])
