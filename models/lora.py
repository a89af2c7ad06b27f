"""LoRA (arXiv 2106.09685): low-rank adapters of a decoder's matrices, which train in their place.

An adapter of the matrix W holds A and B, and the layer computes x W + scale * (x A) B. B starts as
zeros, so a fresh adapter changes nothing. Names and sizes of the matrices come from the layer: a
matrix is a parameter with the metadata `inputs`, its number of axes that are summed over.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from models.layers import product
from models.text import TextDecoder
from paravt_jax.checks import require_above, require_at_least

NOTHING = nnx.State({})
"""The frozen weights of a decoder that is trained as a whole."""


@dataclasses.dataclass(frozen=True)
class LoRASettings:
    """LoRA: the model is frozen, and low-rank adapters of the decoder's matrices are trained."""

    rank: int = 16
    """Inner size of the product A B."""
    alpha: float = 32.0
    """The adapters' output is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """The adapted matrices of each layer, such as q and down; empty: all of them."""

    def __post_init__(self):
        require_at_least("lora", self, 1, "rank")
        require_above("lora", self, 0, "alpha")

    @property
    def scale(self) -> float:
        """Factor of the adapters' output."""
        return self.alpha / self.rank


class Adapter(nnx.Module):
    """A and B of one matrix of every layer, stacked like the matrix.

    Args:
        weight: The matrix, [layers, *inputs, *outputs].
        settings: Rank and scale.
        key: Draws A as PEFT does: uniformly, with variance 1 / (3 * inputs).
    """

    def __init__(self, weight: nnx.Variable, settings: LoRASettings, key: Key[Array, ""]):
        axes, inputs = weight.get_metadata("axes"), weight.get_metadata("inputs")
        layers, *sizes = weight.shape
        bound = math.prod(sizes[:inputs]) ** -0.5
        shape = (layers, *sizes[:inputs], settings.rank)
        a = jax.random.uniform(key, shape, jnp.float32, -bound, bound)
        b = jnp.zeros((layers, settings.rank, *sizes[inputs:]), jnp.float32)
        self.a = nnx.LoRAParam(a, axes=(*axes[: 1 + inputs], "rank"), inputs=inputs)
        self.b = nnx.LoRAParam(b, axes=(axes[0], "rank", *axes[1 + inputs :]), inputs=1)
        self.scale = settings.scale

    def __call__(self, x: Float[Array, "*n i"]) -> Float[Array, "*n *o"]:
        """Return what the adapter of one layer adds to the product of x and the matrix.

        Args:
            x: Input of the matrix, with its input axes as one.
        """
        a = self.a[...]
        return product(product(x, a.reshape(-1, a.shape[-1])) * self.scale, self.b[...])


def matrices(decoder: TextDecoder) -> dict[str, nnx.Variable]:
    """Return the matrices of a decoder's layers, by name."""
    return {
        name: weight
        for name, weight in vars(decoder.layers).items()
        if isinstance(weight, nnx.Variable) and "inputs" in weight.get_metadata()
    }


def add_adapters(decoder: TextDecoder, settings: LoRASettings, seed: int) -> None:
    """Give a decoder fresh adapters, which change none of its outputs.

    Args:
        decoder: Changed in place.
        settings: The adapters.
        seed: Draws their A.

    Raises:
        ValueError: `settings.targets` names something else than a matrix of the layers.
    """
    weights = matrices(decoder)
    unknown = [name for name in settings.targets if name not in weights]
    if unknown:
        raise ValueError(
            f"lora.targets: {', '.join(unknown)}; choose from the matrices of a layer: "
            f"{', '.join(weights)}"
        )
    key = jax.random.key(seed)
    for name in settings.targets or weights:
        own_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        decoder.layers.adapters[name] = Adapter(weights[name], settings, own_key)


def cast(weights: Any, dtype: DTypeLike) -> Any:
    """Return weights in another type."""
    return jax.tree.map(lambda x: x.astype(dtype), weights)


def split(decoder: TextDecoder) -> tuple[Any, Any, Any]:
    """Split a decoder into its structure, its trained weights and its frozen ones.

    Adapters are trained if there are any, and otherwise all weights. `models.trained.split` adds
    what is trained of the vision tower.
    """
    trained = nnx.LoRAParam if decoder.layers.adapters else nnx.Param
    graph, *states = nnx.split(decoder, trained, ...)
    # Copies of the variables, not of their arrays: an update of the decoder must not change them.
    weights, frozen = jax.tree.map(lambda x: x, states)
    return graph, weights, frozen
