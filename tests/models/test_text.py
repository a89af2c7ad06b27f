"""The decoder's fast paths on CPU give what its plain paths give."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.model import abstract_model
from models.qwen3_vl.sizes import tiny
from models.text import TextDecoder


@pytest.fixture(scope="module")
def text() -> TextDecoder:
    graph, state = nnx.split(abstract_model(tiny(97)).text)
    rng = np.random.default_rng(0)
    noise = jax.tree.map(lambda x: jnp.asarray(rng.normal(1.0, 0.3, x.shape), x.dtype), state)
    return nnx.merge(graph, noise)


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
