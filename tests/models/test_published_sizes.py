"""The published sizes, without allocating weights: names, shapes, counts, and FLOPs per token."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from benchmarks.model import vision_flops
from models.attention import PagedCache
from models.attention.paged import BLOCK
from models.config import ModelConfig
from models.family import family
from models.model import abstract_model
from models.qwen3_vl.sizes import qwen3_vl
from models.weights.hf_config import from_hf, to_hf
from tests.models.checkpoint_shapes import tensor_shapes
from tests.models.counts import num_params
from train.learn.speed import flops_per_token

# From transformers 5.23 on the meta device: number of tensors and of parameters, and the digest of
# the sorted lines `name shape`.
TRANSFORMERS = {
    ("qwen3_vl", "2b"): (625, 2_127_532_032, "ef1403e368249df3"),
    ("qwen3_vl", "4b"): (713, 4_437_815_808, "19a1dcfe9dcddddb"),
    ("qwen3_vl", "8b"): (750, 8_767_123_696, "f4b5b35bbb33c17c"),
    ("qwen3_vl", "32b"): (1058, 33_357_390_064, "252bdcd17674d554"),
    ("qwen3_vl_moe", "30b-a3b"): (882, 31_070_754_032, "fc803ecb081def99"),
    ("qwen2_5_vl", "3b"): (824, 3_754_622_976, "77bebe630baa05d2"),
    ("qwen2_5_vl", "7b"): (729, 8_292_166_656, "8f353a3464e7d30f"),
    ("qwen2_5_vl", "32b"): (1161, 33_452_718_336, "96313e2a8a69a4ea"),
    ("qwen2_5_vl", "72b"): (1353, 73_410_777_344, "16d3d8af1e44cd2f"),
}
SIZES = tuple(TRANSFORMERS)
# One of each family.
SOME = (("qwen3_vl", "8b"), ("qwen3_vl_moe", "30b-a3b"), ("qwen2_5_vl", "7b"))


def summary(shapes: dict[str, tuple[int, ...]]) -> tuple[int, int, str]:
    lines = "\n".join(f"{name} {list(shapes[name])}" for name in sorted(shapes))
    return (
        len(shapes),
        sum(map(math.prod, shapes.values())),
        hashlib.sha256(lines.encode()).hexdigest()[:16],
    )


def config_of(size: tuple[str, str]) -> ModelConfig:
    name, published = size
    return family(name).size(published)


@pytest.mark.parametrize("size", SIZES)
def test_names_shapes_and_counts_are_the_recorded_ones(size):
    config = config_of(size)
    found = summary(tensor_shapes(config))
    assert found == TRANSFORMERS[size]
    assert found[1] == num_params(config)


@pytest.mark.parametrize("size", ["2b", "4b", "8b"])
def test_presets_are_the_published_config_files(assets, size):
    assert from_hf(assets / "qwen3_vl" / f"config_{size}.json") == qwen3_vl(size)


def their_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    torch = pytest.importorskip("torch", reason="the oracle; install the extra parity")
    import transformers

    from tests.models.parity_theirs import in_file, parameters_of

    with torch.device("meta"):
        settings = transformers.AutoConfig.for_model(**config)
        model = transformers.AutoModelForImageTextToText.from_config(settings)
    found = parameters_of(model)
    return {name: tuple(in_file(name, parameter).shape) for name, parameter in found.items()}


@pytest.mark.parity
@pytest.mark.parametrize("size", SIZES)
def test_names_and_shapes_equal_transformers(size):
    config = config_of(size)
    theirs = their_shapes(to_hf(config))
    assert tensor_shapes(config) == theirs
    assert summary(theirs) == TRANSFORMERS[size]


def matmul_flops(jaxpr: Any) -> int:
    """FLOPs of all matrix products in a program; a product in a scan counts once per step."""
    total = 0
    for step in jaxpr.eqns:
        if step.primitive.name == "dot_general":
            (contracted, _), _ = step.params["dimension_numbers"]
            left = step.invars[0].aval.shape
            outputs = math.prod(step.outvars[0].aval.shape)
            total += 2 * outputs * math.prod(left[axis] for axis in contracted)
        if step.primitive.name.startswith("ragged_dot"):
            # Every row meets the matrix of one group.
            total += 2 * math.prod(step.outvars[0].aval.shape) * step.invars[0].aval.shape[1]
        times = step.params.get("length", 1) if step.primitive.name == "scan" else 1
        total += times * sum(matmul_flops(inner) for inner in jaxprs_in_params(step.params))
    return total


@pytest.mark.parametrize("size", SOME)
def test_flops_of_a_token_equal_those_of_the_decoding_program(size):
    config = config_of(size)
    b = 3
    c = config.text

    # The last token of a block: the loop over blocks of cached tokens runs once.
    def decode(model, pages):
        cache = PagedCache(pages, jnp.arange(b)[:, None], jnp.full((b, 1), BLOCK - 1))
        hidden, cache = model.text.extend(np.zeros(b, int), np.zeros((3, b), int), cache)
        return model.text.logits(hidden), cache

    shape = (c.num_hidden_layers, b, 2, c.num_key_value_heads, BLOCK, c.head_dim)
    pages = jax.ShapeDtypeStruct(shape, jnp.float32)
    program = jax.make_jaxpr(decode)(abstract_model(config), pages)
    assert matmul_flops(program.jaxpr) == b * flops_per_token(config, BLOCK)


@pytest.mark.parametrize("size", SOME)
def test_flops_of_a_frame_equal_those_of_the_encoding_program(size):
    config = config_of(size)
    b = 3
    grid = (6, 10)
    c = config.vision
    shape: Any = jax.ShapeDtypeStruct((b, grid[0] * grid[1], c.patch_dim), jnp.float32)
    grids = np.tile(grid, (b, 1))
    program = jax.make_jaxpr(lambda tower, patches: tower(patches, grids))(
        abstract_model(config).vision, shape
    )
    assert matmul_flops(program.jaxpr) == b * vision_flops(c, grid[0] * grid[1])
