"""The weights of a tower that only encodes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.qwen3_vl.sizes import tiny
from models.vision import encoding_weights, frame_layout
from tests.noisy_model import noisy_model


def test_a_frozen_tower_takes_half_the_memory_and_gives_the_same():
    """The tower rounds kernels to bfloat16 anyway; all other weights stay float32."""
    config = tiny(464)
    tower = noisy_model(config, jnp.bfloat16).vision
    graph, weights = nnx.split(tower)
    small = encoding_weights(weights, jnp.bfloat16)

    def size(state):
        return sum(x.nbytes for x in jax.tree.leaves(state))

    assert size(small) < 0.6 * size(weights)
    patches = np.random.default_rng(0).normal(size=(2, 16, config.vision.patch_dim))
    layout = frame_layout((4, 4), config.vision)
    run = jax.jit(lambda w: nnx.merge(graph, w)(jnp.asarray(patches, jnp.float32), layout))
    # Without this option XLA on CPU may leave out the rounding.
    exactly: dict[str, str | bool] = {"xla_allow_excess_precision": False}
    one, other = (run.lower(w).compile(compiler_options=exactly)(w) for w in (weights, small))
    np.testing.assert_array_equal(one, other)
    abstract = encoding_weights(jax.eval_shape(lambda: weights), jnp.bfloat16)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(abstract)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(small)
    ]
