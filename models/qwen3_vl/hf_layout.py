"""Which tensor of a Hugging Face checkpoint belongs to which parameter, and in what layout.

A parameter here may differ from its tensor there in three ways:

    a stack of layers     text/layers/q [l, d, n, h]    one tensor per layer
    a matrix product      x @ weight, [in, out]         weight @ x, [out, in]
    heads                 axes of their own, [d, n, h]  joined, [n * h, d]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Shaped

from models.qwen3_vl.config import Qwen3VLConfig
from models.qwen3_vl.model import abstract_model
from models.weights import tensor_file

EMBEDDING = "model.language_model.embed_tokens.weight"
# Some checkpoints repeat the tied embedding under this name.
TIED_HEAD = "lm_head.weight"

# A file and the entry of one of its tensors.
Stored = tuple[Path, tensor_file.Tensor]


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """The tensor (or one per layer) that holds a parameter.

    Args:
        name: name of the tensor, with `{}` for the layer's number in a stack.
        inputs: number of leading axes of our parameter that the product sums over. The checkpoint
            has [out, in] instead. 0: both have the same layout.
        shape: shape of the tensor, if it is neither our shape nor [out, in].
    """

    name: str
    inputs: int = 0
    shape: tuple[int, ...] | None = None

    @property
    def stacked(self) -> bool:
        return "{}" in self.name

    def tensor_shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor, given that of our parameter (of one layer)."""
        if self.shape:
            return self.shape
        if not self.inputs:
            return ours
        return math.prod(ours[self.inputs :]), math.prod(ours[: self.inputs])

    def read(
        self, stored: Stored, ours: tuple[int, ...], index: tuple[slice, ...]
    ) -> Shaped[np.ndarray, "..."]:
        """Reads the block `index` of our parameter of shape `ours`, in the file's type."""
        # View both as matrices. Ours is [axes before the cut, axes after it].
        cut = self.inputs or 1
        first = matrix_slice(index[:cut], ours[:cut])
        second = matrix_slice(index[cut:], ours[cut:])
        rows, columns = (second, first) if self.inputs else (first, second)
        block = tensor_file.read(*stored, rows, columns, transpose=self.inputs > 0)
        shape = [len(range(size)[part]) for part, size in zip(index, ours, strict=True)]
        return block.reshape(shape)

    def matrix(self, ours: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "i j"]:
        """The tensor as `tensor_file.write` takes it: a view of our parameter, not a copy."""
        cut = self.inputs or 1
        flat = ours.reshape(math.prod(ours.shape[:cut]), -1)
        return flat.T if self.inputs else flat


def matrix_slice(index: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
    """The slice of the joined axes that a block `index` of axes of size `shape` takes.

    ValueError unless only the first axis is cut. For heads: between heads, not inside a head.
    """
    if not shape:
        return slice(0, 1)
    inner = math.prod(shape[1:])
    if any(len(range(size)[part]) != size for part, size in zip(index[1:], shape[1:], strict=True)):
        raise ValueError(
            f"sharding = {index} of axes {shape}: only the first of them may be divided; change "
            "models.sharding.RULES"
        )
    start, stop, _ = index[0].indices(shape[0])
    return slice(start * inner, stop * inner)


def tensor_layouts(config: Qwen3VLConfig) -> dict[str, TensorLayout]:
    """Path of each parameter -> its tensor, in the order in which new files hold the tensors."""
    return _direct_layouts(config) | _projection_layouts(config) | _vision_layouts(config)


def _direct_layouts(config: Qwen3VLConfig) -> dict[str, TensorLayout]:
    """Embeddings, the decoder's norms and output projection."""
    layer = "model.language_model.layers.{}"
    # The checkpoint has the patch embedding as a 3-D convolution.
    v = config.vision
    convolution = (v.hidden_size, v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size)
    patch = "model.visual.patch_embed.proj"
    return {
        "text/embedding": TensorLayout(EMBEDDING),
        "text/norm": TensorLayout("model.language_model.norm.weight"),
        "text/layers/input_norm": TensorLayout(f"{layer}.input_layernorm.weight"),
        "text/layers/post_norm": TensorLayout(f"{layer}.post_attention_layernorm.weight"),
        "text/layers/q_norm": TensorLayout(f"{layer}.self_attn.q_norm.weight"),
        "text/layers/k_norm": TensorLayout(f"{layer}.self_attn.k_norm.weight"),
        # [n, h, d]: the product sums over heads and head_dim.
        "text/layers/o": TensorLayout(f"{layer}.self_attn.o_proj.weight", inputs=2),
        "vision/positions": TensorLayout("model.visual.pos_embed.weight"),
        "vision/patch/kernel": TensorLayout(f"{patch}.weight", 1, convolution),
        "vision/patch/bias": TensorLayout(f"{patch}.bias"),
    }


def _projection_layouts(config: Qwen3VLConfig) -> dict[str, TensorLayout]:
    """The decoder's other projections, and its head."""
    layer = "model.language_model.layers.{}"
    table = {}
    for name in ("q", "k", "v"):
        tensor = f"{layer}.self_attn.{name}_proj.weight"
        table[f"text/layers/{name}"] = TensorLayout(tensor, inputs=1)
    for name in ("gate", "up", "down"):
        tensor = f"{layer}.mlp.{name}_proj.weight"
        table[f"text/layers/{name}"] = TensorLayout(tensor, inputs=1)
    if not config.text.tie_word_embeddings:
        table["text/head"] = TensorLayout("lm_head.weight")
    return table


def _vision_layouts(config: Qwen3VLConfig) -> dict[str, TensorLayout]:
    """The blocks and mergers of the vision tower."""
    block = "model.visual.blocks.{}"
    linears = {
        "vision/blocks/qkv": f"{block}.attn.qkv",
        "vision/blocks/out": f"{block}.attn.proj",
        "vision/blocks/up": f"{block}.mlp.linear_fc1",
        "vision/blocks/down": f"{block}.mlp.linear_fc2",
    }
    norms = {f"vision/blocks/{name}": f"{block}.{name}" for name in ("norm1", "norm2")}
    mergers = {"vision/merger": "model.visual.merger"}
    if config.vision.levels:
        mergers["vision/deepstack"] = "model.visual.deepstack_merger_list.{}"
    for ours, theirs in mergers.items():
        linears[f"{ours}/fc1"] = f"{theirs}.linear_fc1"
        linears[f"{ours}/fc2"] = f"{theirs}.linear_fc2"
        norms[f"{ours}/norm"] = f"{theirs}.norm"
    table = {}
    for ours, theirs in linears.items():
        table[f"{ours}/kernel"] = TensorLayout(f"{theirs}.weight", inputs=1)
        table[f"{ours}/bias"] = TensorLayout(f"{theirs}.bias")
    for ours, theirs in norms.items():
        table[f"{ours}/scale"] = TensorLayout(f"{theirs}.weight")
        table[f"{ours}/bias"] = TensorLayout(f"{theirs}.bias")
    return table


def flat_parameters(state: Any) -> dict[str, Any]:
    """Path (`text/layers/q`) -> parameter."""
    return {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor belongs: the parameter's path, its number in a stack, its own shape."""

    path: str
    number: int | None
    shape: tuple[int, ...]


def tensor_places(
    layouts: Mapping[str, TensorLayout], parameters: Mapping[str, nnx.Variable]
) -> dict[str, Place]:
    """Name of each tensor -> its place."""
    places = {}
    for path, layout in layouts.items():
        shape = parameters[path].shape
        if layout.stacked:
            for number in range(shape[0]):
                place = Place(path, number, layout.tensor_shape(shape[1:]))
                places[layout.name.format(number)] = place
        else:
            places[layout.name] = Place(path, None, layout.tensor_shape(shape))
    return places


def tensor_shapes(config: Qwen3VLConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors, as in transformers."""
    layouts = tensor_layouts(config)
    parameters = flat_parameters(nnx.state(abstract_model(config), nnx.Param))
    return {name: place.shape for name, place in tensor_places(layouts, parameters).items()}
