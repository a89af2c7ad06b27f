"""Which tensor of a Hugging Face checkpoint belongs to which parameter, and in what layout.

A parameter here may differ from its tensor there in these ways:

    a stack of layers     text/layers/q [l, d, n, h]    one tensor per layer
    a matrix product      x @ weight, [in, out]         weight @ x, [out, in]
    heads                 axes of their own, [d, n, h]  joined, [n * h, d]
    biases of heads       [n, h]                        joined, [n * h]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Shaped

from models.config import ModelConfig, TextConfig, VisionConfig
from models.family import family_of
from models.weights.tensor_file import Tensor, TensorType, swapped

EMBEDDING = "text/embedding"
# Some checkpoints repeat the tied embedding under this name.
TIED_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """The tensor (or one per layer) that holds a parameter.

    Args:
        name: name of the tensor, with `{}` for the layer's number in a stack.
        inputs: number of leading axes of our parameter that the product sums over. The checkpoint
            has [out, in] instead. 0: both have the same layout.
        shape: shape of the tensor, if it is neither our shape nor [out, in].
        joined: whether the tensor is a vector that joins all axes of our parameter.
    """

    name: str
    inputs: int = 0
    shape: tuple[int, ...] | None = None
    joined: bool = False

    @property
    def stacked(self) -> bool:
        return "{}" in self.name

    def tensor_shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor, given that of our parameter (of one layer)."""
        if self.shape:
            return self.shape
        if self.joined:
            return (math.prod(ours),)
        if not self.inputs:
            return ours
        return math.prod(ours[self.inputs :]), math.prod(ours[: self.inputs])

    def read(
        self, stored: Tensor, ours: tuple[int, ...], index: tuple[slice, ...]
    ) -> Shaped[np.ndarray, "..."]:
        """Read the block `index` of our parameter of shape `ours`, in the file's type.

        A transposed block is a view: XLA transposes it on the way to a device.
        """
        if not self.inputs and not self.joined:
            if stored.shape == swapped(self.name, ours) != ours:
                return stored.read(swapped(self.name, index)).swapaxes(1, 2)
            return stored.read(index)
        shape = [len(range(size)[axis]) for axis, size in zip(index, ours, strict=True)]
        if self.joined:
            return stored.read((matrix_slice(index, ours),)).reshape(shape)
        inputs = matrix_slice(index[: self.inputs], ours[: self.inputs])
        outputs = matrix_slice(index[self.inputs :], ours[self.inputs :])
        if self.shape:
            block = stored.read((outputs,))
            return block.reshape(len(block), -1)[:, inputs].T.reshape(shape)
        return stored.read((outputs, inputs)).T.reshape(shape)

    def matrix(self, ours: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "i j"]:
        """Return the tensor as `tensor_file.write` takes it: a view of our parameter, not a
        copy."""
        if self.joined:
            return ours.reshape(-1, 1)
        flat = ours.reshape(math.prod(ours.shape[: self.inputs or 1]), -1)
        return flat.T if self.inputs else flat


def matrix_slice(index: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
    """Return the slice of the joined axes that a block `index` of axes of size `shape` takes.

    ValueError unless only the first axis is cut. For heads: between heads, not inside a head.
    """
    inner = math.prod(shape[1:])
    if any(len(range(size)[axis]) != size for axis, size in zip(index[1:], shape[1:], strict=True)):
        raise ValueError(
            f"sharding = {index} of axes {shape}: only the first of them may be divided; change "
            "models.sharding.RULES"
        )
    first, end, _ = index[0].indices(shape[0])
    return slice(first * inner, end * inner)


def tensor_layouts(config: ModelConfig) -> dict[str, TensorLayout]:
    """Map the path of each parameter to its tensor, in the order in which new files hold the
    tensors."""
    return family_of(config).tensor_layouts(config)


def text_layouts(config: TextConfig, decoder: str) -> dict[str, TensorLayout]:
    """Return the parameters of the text decoder.

    Args:
        config: its sizes.
        decoder: what the names of its tensors begin with.
    """
    layer = f"{decoder}.layers.{{}}"
    table = {
        EMBEDDING: TensorLayout(f"{decoder}.embed_tokens.weight"),
        "text/norm": TensorLayout(f"{decoder}.norm.weight"),
        "text/layers/input_norm": TensorLayout(f"{layer}.input_layernorm.weight"),
        "text/layers/post_norm": TensorLayout(f"{layer}.post_attention_layernorm.weight"),
        # [n, h, d]: the product sums over heads and head_dim.
        "text/layers/o": TensorLayout(f"{layer}.self_attn.o_proj.weight", inputs=2),
    }
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            table[f"text/layers/{name}"] = TensorLayout(f"{layer}.self_attn.{name}.weight")
    for name in ("q", "k", "v"):
        tensor = f"{layer}.self_attn.{name}_proj"
        table[f"text/layers/{name}"] = TensorLayout(f"{tensor}.weight", inputs=1)
        if config.attention_bias:
            table[f"text/layers/{name}_bias"] = TensorLayout(f"{tensor}.bias", joined=True)
    if config.experts is None:
        for name in ("gate", "up", "down"):
            table[f"text/layers/{name}"] = TensorLayout(f"{layer}.mlp.{name}_proj.weight", inputs=1)
    else:
        # Published experts have the layout of this project.
        table |= {
            "text/layers/experts/router": TensorLayout(f"{layer}.mlp.gate.weight", inputs=1),
            "text/layers/experts/gate_up": TensorLayout(f"{layer}.mlp.experts.gate_up_proj"),
            "text/layers/experts/down": TensorLayout(f"{layer}.mlp.experts.down_proj"),
        }
    if not config.tie_word_embeddings:
        table["text/head"] = TensorLayout(TIED_HEAD)
    return table


def patch_layout(config: VisionConfig, tensor: str) -> TensorLayout:
    """Return the patch embedding's kernel, which checkpoints have as a 3-D convolution."""
    c = config
    shape = (c.hidden_size, c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size)
    return TensorLayout(tensor, 1, shape)


def linear_layouts(linears: Mapping[str, str]) -> dict[str, TensorLayout]:
    """Return kernels and biases of linear layers, given by path of the layer -> name of its
    tensors."""
    table = {}
    for ours, theirs in linears.items():
        table[f"{ours}/kernel"] = TensorLayout(f"{theirs}.weight", inputs=1)
        table[f"{ours}/bias"] = TensorLayout(f"{theirs}.bias")
    return table


def flat_parameters(state: Any) -> dict[str, Any]:
    """Map paths (`text/layers/q`) to parameters."""
    return {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


@dataclasses.dataclass(frozen=True)
class TensorPlace:
    """Where a tensor belongs: the parameter's path, its number in a stack, its own shape."""

    path: str
    number: int | None
    shape: tuple[int, ...]


def tensor_places(
    layouts: Mapping[str, TensorLayout], parameters: Mapping[str, nnx.Variable]
) -> dict[str, TensorPlace]:
    """Name of each tensor -> its place."""
    places = {}
    for path, layout in layouts.items():
        shape = parameters[path].shape
        if layout.stacked:
            for number in range(shape[0]):
                place = TensorPlace(path, number, layout.tensor_shape(shape[1:]))
                places[layout.name.format(number)] = place
        else:
            places[layout.name] = TensorPlace(path, None, layout.tensor_shape(shape))
    return places


def tensor_types(
    layouts: Mapping[str, TensorLayout], parameters: Mapping[str, nnx.Variable]
) -> dict[str, TensorType]:
    """Return type and shape of each tensor that holds parameters as they are, by name."""
    return {
        name: (np.dtype(parameters[place.path].dtype), place.shape)
        for name, place in tensor_places(layouts, parameters).items()
    }
