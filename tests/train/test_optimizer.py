"""The recipes' optimizers: which weights move, how far, and when."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import train.learn.optimizer
from models.model import abstract_model
from models.qwen3_vl.sizes import tiny
from train.learn.optimizer import OptimizerSettings, make_optimizer


def moved(settings: OptimizerSettings, gradient: float, updates: int) -> list[float]:
    """How far a weight of 0 moves in each update under a constant gradient."""
    optimizer = make_optimizer(settings)
    weights = {"w": jnp.zeros(4)}
    state, distances = optimizer.init(weights), []
    for _ in range(updates):
        changes, state = optimizer.update({"w": jnp.full(4, gradient)}, state, weights)
        weights = optax.apply_updates(weights, changes)
        distances.append(float(jnp.abs(jax.tree.leaves(changes)[0]).max()))
    return distances


def test_adamw_moves_by_its_learning_rate_whatever_the_gradients_size():
    settings = OptimizerSettings(learning_rate=1e-3, weight_decay=0.0)
    for gradient in (1e-2, 1e4):
        assert moved(settings, gradient, 3) == pytest.approx([1e-3] * 3, rel=1e-3)


def test_gradients_are_clipped_by_their_norm_before_the_moments(monkeypatch):
    # With a huge eps an update is proportional to the gradient that Adam sees.
    monkeypatch.setattr(train.learn.optimizer, "EPS", 1e6)
    settings = OptimizerSettings(learning_rate=1.0, weight_decay=0.0)
    assert moved(settings, 100.0, 1) == pytest.approx([0.5e-6], rel=1e-3)
    assert moved(settings, 0.1, 1) == pytest.approx([0.1e-6], rel=1e-3)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_first_moments_may_be_bfloat16(name):
    """First moments become bfloat16; second moments stay float32."""
    # Not a layer's matrix, so AdamW updates it under both.
    weights = {"w": jnp.zeros((4, 3))}

    def types(dtype: Literal["float32", "bfloat16"]) -> list[str]:
        state = make_optimizer(OptimizerSettings(name), dtype).init(weights)
        return sorted(str(x.dtype) for x in jax.tree.leaves(state) if x.shape == (4, 3))

    assert types("float32") == ["float32"] * 2 and types("bfloat16") == ["bfloat16", "float32"]


@pytest.fixture(scope="module")
def weights():
    return nnx.state(abstract_model(tiny(96)).text)


def test_muon_takes_every_matrix_of_the_layers_and_nothing_else(weights):
    state = jax.eval_shape(make_optimizer(OptimizerSettings("muon")).init, weights)
    kept = {"muon": set(), "adam": set()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        which = "muon" if "/muon/" in name else "adam" if "/adam/" in name else None
        if which and leaf.ndim and "ns_coeffs" not in name:
            kept[which].add(name.removesuffix("/value").split("/")[-1])
    assert kept == {
        "muon": {"q", "k", "v", "o", "gate", "up", "down"},
        "adam": {"embedding", "norm", "input_norm", "post_norm", "q_norm", "k_norm"},
    }


def test_muons_update_of_a_matrix_is_orthogonal_layer_by_layer():
    """An update's singular values are nearly equal, unlike those of its gradient."""
    shapes = {"q": (2, 16, 4, 4), "o": (2, 4, 4, 16), "gate": (2, 16, 32)}
    weights = {"layers": {name: jnp.zeros(shape) for name, shape in shapes.items()}}
    optimizer = make_optimizer(OptimizerSettings("muon", learning_rate=3 / 20, weight_decay=0.0))
    rng = np.random.default_rng(0)
    scales = np.logspace(0, -2, 16)[:, None]
    gradients = {
        name: (scales * rng.normal(size=(2, 16, int(np.prod(shape)) // 32))).reshape(shape)
        for name, shape in shapes.items()
    }
    changes, _ = jax.jit(optimizer.update)({"layers": gradients}, optimizer.init(weights), weights)
    for name in shapes:
        for gradient, change in zip(
            gradients[name], np.asarray(changes["layers"][name]), strict=True
        ):
            before, after = (
                np.linalg.svd(x.reshape(16, -1), compute_uv=False) for x in (gradient, change)
            )
            assert before.max() / before.min() > 60 and after.max() / after.min() < 8, name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "sgd"),
        ("learning_rate", -1.0),
        ("learning_rate", float("nan")),
        ("weight_decay", -0.1),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"optimizer\.{field}: "):
        OptimizerSettings(**{field: value})
