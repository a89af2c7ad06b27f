"""Small models whose weights are noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from models.config import ModelConfig
from models.model import VisionLanguageModel, abstract_model


def noisy_model(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> VisionLanguageModel:
    """A model whose noise is large enough that the frames decide what it says."""
    graph, state = nnx.split(abstract_model(config, dtype=dtype))
    rng = np.random.default_rng(0)  # not the model's own start, which takes seconds to compile

    def noise(path, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        middle = 1.0 if "norm" in str(path) or "scale" in str(path) else 0.0
        return jnp.asarray(rng.normal(middle, 0.2, leaf.shape), leaf.dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(noise, state))
