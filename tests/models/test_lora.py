"""Adapters: what they compute, what is trained, and fingerprints of weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config import TextConfig
from models.fingerprint import fingerprint
from models.lora import LoRASettings, add_adapters, split
from models.peft_folder import merge_adapters
from models.qwen3_vl.sizes import tiny
from models.text import TextDecoder

SETTINGS = LoRASettings(rank=4, alpha=6.0)


def make_text(settings: LoRASettings | None = None) -> TextDecoder:
    """A small decoder with random weights; with settings, also with random adapters."""
    graph, state = nnx.split(nnx.eval_shape(lambda: TextDecoder(config(), rngs=nnx.Rngs(0))))
    draw = np.random.default_rng(5)

    def noise(path, x):
        return x.replace(jnp.asarray(draw.normal("norm" in path[-1], 0.1, x.shape), x.dtype))

    text = nnx.merge(graph, nnx.map_state(noise, state))
    if settings is not None:
        add_adapters(text, settings, seed=1)
        rng = np.random.default_rng(2)
        for adapter in text.layers.adapters.values():
            b = rng.normal(0, 0.1, adapter.b.shape)
            adapter.b.set_value(jnp.asarray(b, jnp.float32))
    return text


def config() -> TextConfig:
    return dataclasses.replace(tiny(96).text, num_hidden_layers=2)


def inputs(rows: int = 2, tokens: int = 9) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(3).integers(0, 96, (rows, tokens))
    return ids, np.broadcast_to(np.arange(tokens), (3, rows, tokens))


@nnx.jit
def states(text: TextDecoder) -> jax.Array:
    """Hidden states of the inputs."""
    return text(*inputs())[0]


def test_fresh_adapters_change_no_bit_of_the_output():
    text = make_text()
    hidden = states(text)
    add_adapters(text, SETTINGS, seed=0)
    assert (np.asarray(states(text)) == np.asarray(hidden)).all()


def test_adapters_compute_what_the_merged_matrices_compute():
    text = make_text(SETTINGS)
    before = states(text)
    merge_adapters(text)
    after = states(text)
    assert not jax.tree.leaves(nnx.state(text, nnx.LoRAParam))
    np.testing.assert_allclose(before, after, atol=2e-4)
    assert np.abs(np.asarray(after - states(make_text()))).max() > 0.1


def test_a_target_that_no_layer_has_is_refused():
    with pytest.raises(ValueError, match="lora.targets: q_proj; choose from .*: down, gate, k, o"):
        make_text(LoRASettings(targets=("q", "q_proj")))


@pytest.mark.parametrize(("field", "value"), [("rank", 0), ("alpha", 0.0), ("alpha", float("nan"))])
def test_settings_without_a_meaning_are_refused(field, value):
    with pytest.raises(ValueError, match=f"lora.{field}: "):
        LoRASettings(**{field: value})


def test_only_adapters_are_trained_where_there_are_any():
    _, everything, nothing = split(make_text())
    assert not jax.tree.leaves(nothing)
    assert everything["embedding"][...].size
    _, adapters, base = split(make_text(SETTINGS))
    assert list(adapters) == ["layers"] and list(adapters["layers"]) == ["adapters"]
    assert jax.tree.structure(base) == jax.tree.structure(everything)


def test_a_fingerprint_depends_on_every_bit_place_and_name():
    state = nnx.state(make_text(SETTINGS))
    wanted = fingerprint(state)
    for path, number in ((("layers", "q"), 5), (("norm",), 0), (("embedding",), -1)):
        leaf: Any = state
        for name in path:
            leaf = leaf[name]
        value = np.array(leaf[...])
        flat = value.reshape(-1)
        kept = flat[number]
        flat[number] = np.nextafter(kept, np.float32(9))
        leaf.set_value(jnp.asarray(value))
        assert fingerprint(state) != wanted
        flat[number] = kept
        leaf.set_value(jnp.asarray(value))
        assert fingerprint(state) == wanted
    layers: Any = state["layers"]
    up, gate = layers["up"], layers["gate"]
    swapped = up[...], gate[...]
    gate.set_value(swapped[0])
    up.set_value(swapped[1])
    assert fingerprint(state) != wanted


def test_a_fingerprint_is_that_of_the_cast_weights_and_a_sum_over_states():
    _, weights, frozen = split(make_text(SETTINGS))
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (weights, frozen))
    assert fingerprint(weights, frozen, dtype=jnp.bfloat16) == fingerprint(*cast)
    parts = fingerprint(weights) + fingerprint(frozen)
    assert fingerprint(weights, frozen) == parts % 2**32
