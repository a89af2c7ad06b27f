"""The decoder's fast paths on CPU give what its plain paths give."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention import DenseCache, RowLayout, Shared
from models.model import abstract_model
from models.qwen3_vl.sizes import tiny
from models.text import TextDecoder


@pytest.fixture(scope="module")
def text() -> TextDecoder:
    graph, state = nnx.split(abstract_model(tiny(97)).text)
    rng = np.random.default_rng(0)
    noise = jax.tree.map(lambda x: jnp.asarray(rng.normal(1.0, 0.3, x.shape), x.dtype), state)
    return nnx.merge(graph, noise)


@pytest.mark.slow
def test_decoding_with_unstacked_layers_equals_a_whole_pass(text):
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, 97, (2, 5))
    ids = rng.integers(0, 97, (4, 6))
    _, prefix = text(prompts, spots(0, 5, 2))
    seen = jnp.asarray(np.arange(5) < np.array([[5], [3]]))
    # Two rows continue each prompt.
    repeated = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=1), prefix)
    seen = jnp.repeat(seen, 2, axis=0)
    # A scan over the stacked layers.
    expected, whole = text(
        ids, spots(5, 11, 4), layout=RowLayout(prefix_mask=seen), prefix=repeated
    )
    _, kv = text(ids[:, :4], spots(5, 9, 4), layout=RowLayout(prefix_mask=seen), prefix=repeated)
    shared = Shared.of(prefix, seen)
    layers = text.decode_layers()
    assert layers is not None and len(layers) == 3
    for given in (layers, None):
        cache = DenseCache.prefilled(kv, jnp.ones((4, 4), bool), 2)._replace(shared=shared)
        for i in (4, 5):
            hidden, cache, _ = text.decode(ids[:, i], spots(5 + i, 6 + i, 4)[..., 0], cache, given)
            cache = cache.advance(jnp.ones(4, bool))
            np.testing.assert_allclose(hidden, expected[:, i], atol=2e-5, rtol=0)
        k, v = cache.since(0)
        np.testing.assert_allclose(k, whole.k, atol=2e-5, rtol=0)
        np.testing.assert_allclose(v, whole.v, atol=2e-4, rtol=0)


def spots(first: int, last: int, rows: int) -> np.ndarray:
    """Text positions first ... last - 1 on all three axes."""
    return np.broadcast_to(np.arange(first, last), (3, rows, last - first))


def test_logits_do_not_depend_on_how_many_rows_there_are(text):
    hidden = jnp.asarray(np.random.default_rng(2).normal(size=(3, 40, 128)), jnp.float32)
    expected = np.asarray(hidden) @ np.asarray(text.embedding[...]).T
    # 120, 40 and 1 rows: the head comes first for up to 64.
    for rows, wanted in (
        (hidden, expected),
        (hidden[:1], expected[:1]),
        (hidden[0, 0], expected[0, 0]),
    ):
        np.testing.assert_allclose(text.logits(rows), wanted, atol=1e-3, rtol=0)
