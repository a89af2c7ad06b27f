"""Mixtures of experts: a plain reference, rows that no kernel fills, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import experts
from models.config import ExpertsConfig
from models.experts import Experts
from models.family import family
from models.lora import LoRASettings
from models.model import abstract_model
from models.qwen3_vl.sizes import tiny
from models.weights.hf_config import from_hf, to_hf

TEXT = dataclasses.replace(
    tiny(96).text, hidden_size=16, num_hidden_layers=1, experts=ExpertsConfig(6, 2, 10)
)
RAGGED_DOT = jax.lax.ragged_dot


def weights() -> tuple[jax.Array, jax.Array, jax.Array]:
    layer = Experts(TEXT, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    return layer.router[0], layer.gate_up[0], layer.down[0]


def tokens() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (2, 5, 16))


def mixture(x: Any, router: Any, gate_up: Any, down: Any, first: Any = 0) -> jax.Array:
    return experts._mixture(x, router, gate_up, down, 2, first)


def spoilt(out: jax.Array, sizes: jax.Array) -> jax.Array:
    """Rows behind the last group are not a number."""
    return jnp.where(jnp.arange(len(out))[:, None] < sizes.sum(), out, jnp.nan)


@jax.custom_vjp
def unfilled(rows: jax.Array, groups: jax.Array, sizes: jax.Array) -> jax.Array:
    return spoilt(RAGGED_DOT(rows, groups, sizes), sizes)


def forward(rows: jax.Array, groups: jax.Array, sizes: jax.Array) -> Any:
    return unfilled(rows, groups, sizes), (rows, groups, sizes)


def backward(saved: Any, cotangent: jax.Array) -> Any:
    rows, groups, sizes = saved
    _, pull_back = jax.vjp(lambda rows, groups: RAGGED_DOT(rows, groups, sizes), rows, groups)
    of_rows, of_groups = pull_back(cotangent)
    return spoilt(of_rows, sizes), of_groups, None


unfilled.defvjp(forward, backward)


@pytest.mark.slow
def test_rows_that_a_kernel_leaves_as_they_are_reach_no_gradient(monkeypatch):
    """JAX says nothing about rows behind the last group, where those of other devices are."""

    def whole(x: jax.Array, parts: Any) -> jax.Array:
        return (mixture(x, *parts) ** 2).sum()

    def divided(x: jax.Array, parts: Any) -> jax.Array:
        router, gate_up, down = parts
        halves = [mixture(x, router, gate_up[i : i + 3], down[i : i + 3], i) for i in (0, 3)]
        return ((halves[0] + halves[1]) ** 2).sum()

    wanted = jax.value_and_grad(whole, (0, 1))(tokens(), weights())
    monkeypatch.setattr(jax.lax, "ragged_dot", unfilled)
    found = jax.value_and_grad(divided, (0, 1))(tokens(), weights())
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("norm_topk_prob", False, "text_config.norm_topk_prob = False"),
        ("mlp_only_layers", [1], r"text_config.mlp_only_layers = \[1\]"),
        ("decoder_sparse_step", 2, "text_config.decoder_sparse_step = 2"),
        ("num_experts_per_tok", 9, "num_experts_per_tok = 9"),
        ("moe_intermediate_size", 128, "text_config.hidden_size = 128: .* square"),
        ("moe_intermediate_size", 64, "text_config.hidden_size = 128: .* square"),
    ],
)
def test_other_mixtures_are_refused(field, value, message):
    content = to_hf(family("qwen3_vl_moe").tiny(96))
    content["text_config"][field] = value
    with pytest.raises(ValueError, match=message):
        from_hf(content)


def test_a_file_may_name_experts_as_transformers_does_and_must_name_them():
    config = family("qwen3_vl_moe").tiny(96)
    content = to_hf(config)
    content["text_config"]["num_local_experts"] = content["text_config"].pop("num_experts")
    assert from_hf(content) == config
    del content["text_config"]["num_local_experts"]
    with pytest.raises(ValueError, match="has no num_experts"):
        from_hf(content)
    with pytest.raises(ValueError, match="every layer has experts"):
        dataclasses.replace(config, text=dataclasses.replace(config.text, experts=None))


def test_adapters_leave_experts_alone():
    config = family("qwen3_vl_moe").tiny(96)
    model = abstract_model(config, lora=LoRASettings(rank=4))
    assert sorted(model.text.layers.adapters) == ["k", "o", "q", "v"]
