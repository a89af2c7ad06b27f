"""The model: one vision tower, one decoder, one set of weights for sampling and training; and the sample it reads.

Owns how the two are put together. Callers run the tower once a frame, keep its features, and hand them to the decoder as a bank.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from models.qwen3_vl.config import Qwen3VLConfig
from models.qwen3_vl.text import TextDecoder
from models.qwen3_vl.vision import VisionTower


class Inputs(NamedTuple):
    """One sample, as `models.processor.Processor` makes it. `visual_index` counts the visual tokens, -1 where a token is text.

    `grids` holds (time, height, width) in patches of each image and video, as they come in the text; `patches` stand in the same order.
    """

    ids: Int32[np.ndarray, " t"]
    positions: Int32[np.ndarray, "3 t"]
    visual_index: Int32[np.ndarray, " t"]
    patches: Float[np.ndarray, "p c"]
    grids: list[tuple[int, int, int]]


class Qwen3VL(nnx.Module):
    """Qwen3-VL (dense).

    `dtype` is the type of activations, `param_dtype` that of stored weights; in float32 those of the 8B take 35 GB. On TPU and GPU, XLA
    multiplies float32 in bf16 or TF32 passes unless under `jax.default_matmul_precision("highest")`; bounds of parity are CPU's.
    """

    def __init__(
        self,
        config: Qwen3VLConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ):
        self.config = config
        self.vision = VisionTower(config.vision, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.text = TextDecoder(config.text, rngs=rngs, dtype=dtype, param_dtype=param_dtype)


def abstract_model(
    config: Qwen3VLConfig, *, dtype: DTypeLike = jnp.float32, param_dtype: DTypeLike = jnp.float32
) -> Qwen3VL:
    """The model with shapes in the place of weights: nothing is allocated."""
    return nnx.eval_shape(
        lambda: Qwen3VL(config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=param_dtype)
    )


def num_params(config: Qwen3VLConfig) -> int:
    """Weights of both towers; tied embeddings count once."""
    return sum(
        math.prod(p.shape) for p in jax.tree.leaves(nnx.state(abstract_model(config), nnx.Param))
    )
