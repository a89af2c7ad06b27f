"""A vision-language model: a vision tower and a text decoder, one set of weights for all uses.

Callers run the tower once per frame, keep its features, and pass them to the decoder as a bank.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.config import ModelConfig
from models.family import family_of
from models.lora import LoRASettings, add_adapters
from models.text import TextDecoder


class VisionLanguageModel(nnx.Module):
    """The vision tower and the text decoder of a family's model.

    On TPU and GPU, XLA multiplies float32 in bfloat16 or TF32 passes. Use
    `jax.default_matmul_precision("highest")` there to compare with another implementation.

    Args:
        config: sizes of both towers.
        rngs: source of the initial weights.
        dtype: type of activations.
        param_dtype: type of stored weights. In float32 the weights of the 8B model take 35 GB.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ):
        self.config = config
        tower = family_of(config).tower
        self.vision = tower(config.vision, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.text = TextDecoder(config.text, rngs=rngs, dtype=dtype, param_dtype=param_dtype)


def abstract_model(
    config: ModelConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    lora: LoRASettings | None = None,
) -> VisionLanguageModel:
    """Return the model, with adapters if any, that has shapes and types in place of weights."""

    def make() -> VisionLanguageModel:
        model = VisionLanguageModel(config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=param_dtype)
        if lora is not None:
            add_adapters(model.text, lora, seed=0)
        return model

    return nnx.eval_shape(make)
