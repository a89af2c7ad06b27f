"""The decoder's fast ways on CPU give what its plain ones give."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen3_vl import KV, abstract_model, tiny
from models.qwen3_vl.text import TextDecoder


@pytest.fixture(scope="module")
def text() -> TextDecoder:
    graph, state = nnx.split(abstract_model(tiny(97)).text)
    rng = np.random.default_rng(0)
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(rng.normal(1.0, 0.3, x.shape), x.dtype), state))


def test_layers_as_arrays_of_their_own_decode_as_the_stack_does(text):
    rng = np.random.default_rng(1)
    cache = KV(*(jnp.asarray(rng.normal(size=(3, 4, 6, 2, 64)), jnp.float32) for _ in "kv"))
    prefix = tuple(jnp.asarray(rng.normal(size=(3, 2, 2, 5, 64)), jnp.float32) for _ in "kv")
    ids, positions, mask = jnp.arange(4), jnp.full((3, 4), 9), jnp.broadcast_to(jnp.arange(6) <= 4, (4, 6))
    layers = text.decode_layers()
    assert layers is not None and len(layers) == 3
    stacked, (k, v) = text.decode(ids, positions, cache, mask, jnp.int32(4), prefix)
    apart, (own_k, own_v) = text.decode(ids, positions, cache, mask, jnp.int32(4), prefix, layers=layers)
    np.testing.assert_allclose(apart, stacked, atol=2e-5, rtol=0)
    np.testing.assert_allclose(own_k, k, atol=2e-5, rtol=0)
    np.testing.assert_allclose(own_v, v, atol=2e-4, rtol=0)


def test_logits_do_not_depend_on_how_many_rows_there_are(text):
    hidden = jnp.asarray(np.random.default_rng(2).normal(size=(3, 40, 128)), jnp.float32)
    expected = np.asarray(hidden) @ np.asarray(text.embedding[...]).T
    for rows, wanted in ((hidden, expected), (hidden[:1], expected[:1]), (hidden[0, 0], expected[0, 0])):  # 120, 40 and 1
        np.testing.assert_allclose(text.logits(rows), wanted, atol=1e-3, rtol=0)
