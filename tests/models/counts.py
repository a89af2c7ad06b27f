"""Counts that tests compare models by."""

from __future__ import annotations

import math

import jax
from flax import nnx

from models.config import ModelConfig
from models.model import abstract_model


def num_params(config: ModelConfig) -> int:
    """Return the number of parameters of both towers; tied embeddings count once."""
    parameters = nnx.state(abstract_model(config), nnx.Param)
    return sum(math.prod(p.shape) for p in jax.tree.leaves(parameters))
