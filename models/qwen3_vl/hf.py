"""Weights in and out in the Hugging Face layout: safetensors files and a `config.json`, as transformers 4.57 and 5.x write and read them.

Owns the correspondence of names and layouts. Refuses weights that are not exactly the model's, in one error that names all of them.
Invariants: what `save` wrote, `load` reads back bit for bit; in both directions the host works on one tensor at a time beside the
parameters themselves.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from models.qwen3_vl.config import Qwen3VLConfig
from models.qwen3_vl.hf_config import from_hf, to_hf
from models.qwen3_vl.model import Qwen3VL, abstract_model
from models.sharding import param_shardings
from models.weights import folder as hf_folder
from models.weights import tensor_file
from paravt_jax.method import tokenizer

_TIED_HEAD = "lm_head.weight"  # some files repeat the tied embedding under this name
_EMBEDDING = "model.language_model.embed_tokens.weight"

_Stored = tuple[Path, tensor_file.Tensor]


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One of our parameters in their layout.

    `name` has `{}` where the number in a stack goes. `inputs` counts our axes that a matrix takes in (theirs is [out, in]), 0
    where the tensor is the same in both. `shape` is theirs where it is neither ours nor [out, in].
    """

    name: str
    inputs: int = 0
    shape: tuple[int, ...] | None = None

    @property
    def stacked(self) -> bool:
        return "{}" in self.name

    def theirs(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        if self.shape or not self.inputs:
            return self.shape or ours
        return math.prod(ours[self.inputs :]), math.prod(ours[: self.inputs])

    def read(
        self, stored: _Stored, ours: tuple[int, ...], index: tuple[slice, ...]
    ) -> Shaped[np.ndarray, "..."]:
        """The block `index` of our array of shape `ours`, in the file's type."""
        cut = self.inputs or 1
        first, second = _flat(index[:cut], ours[:cut]), _flat(index[cut:], ours[cut:])
        rows, columns = (second, first) if self.inputs else (first, second)
        block = tensor_file.read(*stored, rows, columns, transpose=self.inputs > 0)
        return block.reshape(
            [len(range(size)[part]) for part, size in zip(index, ours, strict=True)]
        )

    def matrix(self, ours: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "i j"]:
        """Their tensor as `tensor_file` writes it: a view, not a copy."""
        cut = self.inputs or 1
        flat = ours.reshape(math.prod(ours.shape[:cut]), -1)
        return flat.T if self.inputs else flat


def _flat(index: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
    """Where a block lies once its axes are one. ValueError unless it is cut along the first alone: between heads, never inside one."""
    if not shape:
        return slice(0, 1)
    inner = math.prod(shape[1:])
    if any(len(range(size)[part]) != size for part, size in zip(index[1:], shape[1:], strict=True)):
        raise ValueError(
            f"sharding = {index} of axes {shape}: only the first of them may be divided; change models.sharding.RULES"
        )
    start, stop, _ = index[0].indices(shape[0])
    return slice(start * inner, stop * inner)


def _tensors(config: Qwen3VLConfig) -> dict[str, _Tensor]:
    """Our parameter path -> its tensor in their layout."""
    layer, block = "model.language_model.layers.{}", "model.visual.blocks.{}"
    v = config.vision
    table = {
        "text/embedding": _Tensor(_EMBEDDING),
        "text/norm": _Tensor("model.language_model.norm.weight"),
        "text/layers/input_norm": _Tensor(f"{layer}.input_layernorm.weight"),
        "text/layers/post_norm": _Tensor(f"{layer}.post_attention_layernorm.weight"),
        "text/layers/q_norm": _Tensor(f"{layer}.self_attn.q_norm.weight"),
        "text/layers/k_norm": _Tensor(f"{layer}.self_attn.k_norm.weight"),
        "text/layers/o": _Tensor(f"{layer}.self_attn.o_proj.weight", inputs=2),
        "vision/positions": _Tensor("model.visual.pos_embed.weight"),
        "vision/patch/kernel": _Tensor(
            "model.visual.patch_embed.proj.weight",
            1,
            (v.hidden_size, v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size),
        ),
        "vision/patch/bias": _Tensor("model.visual.patch_embed.proj.bias"),
    }
    table |= {
        f"text/layers/{ours}": _Tensor(f"{layer}.self_attn.{ours}_proj.weight", inputs=1)
        for ours in ("q", "k", "v")
    }
    table |= {
        f"text/layers/{ours}": _Tensor(f"{layer}.mlp.{ours}_proj.weight", inputs=1)
        for ours in ("gate", "up", "down")
    }
    if not config.text.tie_word_embeddings:
        table["text/head"] = _Tensor("lm_head.weight")
    in_block = {
        "qkv": "attn.qkv",
        "out": "attn.proj",
        "up": "mlp.linear_fc1",
        "down": "mlp.linear_fc2",
    }
    linears = {f"vision/blocks/{ours}": f"{block}.{theirs}" for ours, theirs in in_block.items()}
    norms = {f"vision/blocks/{name}": f"{block}.{name}" for name in ("norm1", "norm2")}
    mergers = {"vision/merger": "model.visual.merger"}
    if v.levels:
        mergers["vision/deepstack"] = "model.visual.deepstack_merger_list.{}"
    for ours, theirs in mergers.items():
        linears |= {f"{ours}/{fc}": f"{theirs}.linear_{fc}" for fc in ("fc1", "fc2")}
        norms[f"{ours}/norm"] = f"{theirs}.norm"
    for ours, theirs in linears.items():
        table |= {
            f"{ours}/kernel": _Tensor(f"{theirs}.weight", inputs=1),
            f"{ours}/bias": _Tensor(f"{theirs}.bias"),
        }
    for ours, theirs in norms.items():
        table |= {
            f"{ours}/scale": _Tensor(f"{theirs}.weight"),
            f"{ours}/bias": _Tensor(f"{theirs}.bias"),
        }
    return table


def _parameters(state: Any) -> dict[str, Any]:
    return {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a tensor of theirs stands among our parameters (`number`: in a stack), and its shape there."""

    path: str
    number: int | None
    shape: tuple[int, ...]


def _layout(config: Qwen3VLConfig, parameters: Mapping[str, nnx.Variable]) -> dict[str, _Place]:
    """Their name -> its place."""
    layout = {}
    for path, tensor in _tensors(config).items():
        shape = parameters[path].shape
        if tensor.stacked:
            layout |= {
                tensor.name.format(number): _Place(path, number, tensor.theirs(shape[1:]))
                for number in range(shape[0])
            }
        else:
            layout[tensor.name] = _Place(path, None, tensor.theirs(shape))
    return layout


def tensor_shapes(config: Qwen3VLConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a checkpoint, as transformers has them."""
    parameters = _parameters(nnx.state(abstract_model(config), nnx.Param))
    return {name: place.shape for name, place in _layout(config, parameters).items()}


def _headers(
    folder: Path, config: Qwen3VLConfig, layout: Mapping[str, _Place]
) -> dict[str, tensor_file.Header]:
    shapes = {name: place.shape for name, place in layout.items()}
    return hf_folder.read_headers(
        folder, shapes, {_TIED_HEAD: shapes[_EMBEDDING]} if config.text.tie_word_embeddings else {}
    )


def load(
    source: str | os.PathLike,
    config: Qwen3VLConfig | None = None,
    *,
    mesh: Mesh | None = None,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
) -> Qwen3VL:
    """The model in `source`, a folder (`model.safetensors`, or several files and their index) or a hub id (`Qwen/Qwen3-VL-8B-Instruct`).

    Weights become `param_dtype` and lie over `mesh` by the rules of `models.sharding`; without a mesh, on one device. Every process
    of the mesh has to call. Each reads the slices that its own shards need, one tensor after another.
    `config` defaults to the folder's `config.json`.

    FileNotFoundError without weights, and where the hub has no such id or cannot be reached. ValueError naming a damaged file, and
    one listing every tensor that is missing, unknown, of another shape or there twice.
    """
    _require_float("dtype", dtype)
    _require_float("param_dtype", param_dtype)
    folder = hf_folder.local_folder(source)
    config = from_hf(folder / hf_folder.CONFIG) if config is None else config
    model = abstract_model(config, dtype=dtype, param_dtype=param_dtype)
    graph, state = nnx.split(model)
    parameters = _parameters(state)
    headers = _headers(folder, config, _layout(config, parameters))
    stored = {
        name: (folder / file, tensor)
        for file, header in headers.items()
        for name, tensor in header.tensors.items()
    }
    shardings = (
        {path: leaf.get_value() for path, leaf in _parameters(param_shardings(state, mesh)).items()}
        if mesh
        else {}
    )
    for path, tensor in _tensors(config).items():
        variable = parameters[path]
        variable.set_value(
            _value(tensor, stored, variable.shape, variable.dtype, shardings.get(path))
        )
    return nnx.merge(graph, state)


def _require_float(field: str, value: DTypeLike) -> None:
    try:
        known = jnp.issubdtype(value, jnp.floating)
    except TypeError:
        known = False
    if not known:
        raise ValueError(
            f"{field} = {value!r}: no type of numbers that a model computes with; give float32 or bfloat16"
        )


def _value(
    tensor: _Tensor,
    stored: Mapping[str, _Stored],
    shape: tuple[int, ...],
    dtype: DTypeLike,
    sharding: NamedSharding | None,
) -> jax.Array:
    """A parameter. It waits for every tensor: transfers that queue up would hold their host buffers."""
    if not tensor.stacked:
        return (
            _on_devices(tensor, stored[tensor.name], shape, sharding)
            .astype(dtype)
            .block_until_ready()
        )
    stack = jnp.zeros(shape, dtype, device=sharding)
    inner = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:])) if sharding else None
    insert = jax.jit(_insert, donate_argnums=0, out_shardings=sharding)
    for number in range(shape[0]):
        part = _on_devices(tensor, stored[tensor.name.format(number)], shape[1:], inner)
        stack = insert(stack, part, number).block_until_ready()
    return stack


def _insert(
    stack: Float[Array, "l ..."], part: Float[Array, "..."], number: Int[Array, ""]
) -> Float[Array, "l ..."]:
    return jax.lax.dynamic_update_index_in_dim(stack, part.astype(stack.dtype), number, 0)


def _on_devices(
    tensor: _Tensor, stored: _Stored, shape: tuple[int, ...], sharding: NamedSharding | None
) -> jax.Array:
    """One tensor in the file's type. Devices that hold the same block share one reading of it."""
    if sharding is None:
        return jax.device_put(tensor.read(stored, shape, (slice(None),) * len(shape)))
    blocks: dict[str, np.ndarray] = {}

    def block(index: Any) -> np.ndarray:
        if repr(index) not in blocks:
            blocks[repr(index)] = tensor.read(stored, shape, index)
        return blocks[repr(index)]

    return jax.make_array_from_callback(shape, sharding, block, dtype=stored[1].dtype)


def save(
    model: Qwen3VL,
    folder: str | os.PathLike,
    *,
    like: str | os.PathLike | None = None,
    files: Iterable[str | os.PathLike] = (),
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes `model` to a new `folder` that transformers and `load` read, with copies of `files` (a tokenizer of one's own) beside it.

    With `like`, the folder or hub id that the weights came from: its config, tokenizer, template and processor files ride along, and
    weights take its types, files and order. What was not trained then comes out byte for byte where the parameters' type holds every
    number of the file's: float32 does for all, bfloat16 for bfloat16 alone (weights of a float32 file are written as it rounded them).
    Without it: a config.json, and weights in their own types, in files of at most `max_shard_bytes` (or one tensor).
    Where `files` hold a tokenizer.json, its stop and padding ids go into config.json and a
    generation_config.json.

    Every process of a mesh has to call, and see `like` and `files`; the first one writes, from one tensor at a time.
    FileExistsError where `folder` exists; ValueError where `like` is of another configuration; where one process fails alone, the
    others raise RuntimeError. Failure leaves nothing behind, a killed process only a hidden folder, which a later `save` to `folder`
    removes.
    """
    folder, files = Path(folder), [Path(file) for file in files]
    if multihost_utils.broadcast_one_to_all(
        np.asarray(folder.exists())
    ):  # another process may look when the first one is done
        raise FileExistsError(f"{folder}: exists; choose a new folder, or remove this one first")
    parameters = _parameters(nnx.state(model, nnx.Param))
    layout = _layout(model.config, parameters)
    with _together(folder):
        if like is None:
            tensors = {
                name: (np.dtype(parameters[place.path].dtype), place.shape)
                for name, place in layout.items()
            }
            dtype, _ = tensors[_EMBEDDING]
            configs = _configs(model.config, dtype.name, files)
            headers, companions = hf_folder.new_files(configs, tensors, max_shard_bytes)
        else:
            source = hf_folder.local_folder(like)
            _same_config(source, model.config)
            headers, companions = (
                _headers(source, model.config, layout),
                hf_folder.read_companions(source),
            )
        companions |= {file.name: file.read_bytes() for file in files}
    matrices = {
        file: _matrices(model.config, parameters, layout, header)
        for file, header in headers.items()
    }
    with _together(folder):
        try:
            if jax.process_index() == 0:
                _write(folder, headers, matrices, companions)
        finally:
            if jax.process_count() > 1:  # all take part in every gathering, whoever has failed
                for rest in matrices.values():
                    collections.deque(rest, maxlen=0)


def _configs(config: Qwen3VLConfig, dtype: str, files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Contents of config.json and, with a tokenizer in `files`, of generation_config.json, by name.

    The special ids stand where the published files have them. Without them transformers' `generate`
    would not stop.
    """
    content: dict[str, Any] = to_hf(config) | {"dtype": dtype}
    vocabulary = next((tokenizer.load(file) for file in files if file.name == tokenizer.FILE), None)
    if vocabulary is None:
        return {hf_folder.CONFIG: content}
    # As published, config.json has no pad id: with it transformers would freeze that embedding.
    content["text_config"] |= {"bos_token_id": vocabulary.pad, "eos_token_id": vocabulary.eos}
    generation = {
        "bos_token_id": vocabulary.pad,
        "pad_token_id": vocabulary.pad,
        "eos_token_id": [vocabulary.eos, vocabulary.pad],
    }
    return {hf_folder.CONFIG: content, hf_folder.GENERATION: generation}


@contextlib.contextmanager
def _together(folder: Path) -> Iterator[None]:
    """A block that all processes leave well, or none: where some fail, the others raise RuntimeError."""
    failed = True
    try:
        yield
        failed = False
    finally:
        failures = np.flatnonzero(multihost_utils.process_allgather(np.asarray(failed)))
    if failures.size:
        raise RuntimeError(
            f"{folder}: not written; process {', '.join(map(str, failures))} failed: see the error there"
        )


def _write(
    folder: Path,
    headers: Mapping[str, tensor_file.Header],
    matrices: Mapping[str, Iterable[Shaped[np.ndarray, "i j"]]],
    companions: Mapping[str, bytes],
) -> None:
    with hf_folder.appearing(folder) as temporary:
        for file, header in headers.items():
            tensor_file.write(temporary / file, header, matrices[file])
        for file, content in companions.items():
            (temporary / file).write_bytes(content)


def _same_config(source: Path, config: Qwen3VLConfig) -> None:
    theirs, ours = (dataclasses.asdict(c) for c in (from_hf(source / hf_folder.CONFIG), config))
    if different := [name for name in ours if theirs[name] != ours[name]]:
        raise ValueError(
            f"like = {source}: its config.json differs from the model's in {', '.join(different)}; give the folder it came from"
        )


def _matrices(
    config: Qwen3VLConfig,
    parameters: Mapping[str, nnx.Variable],
    layout: Mapping[str, _Place],
    header: tensor_file.Header,
) -> Iterator[Shaped[np.ndarray, "i j"]]:
    """The tensors of one file, each gathered when its turn comes."""
    tensors = _tensors(config)
    for name in header.tensors:
        place = layout[name] if name in layout else layout[_EMBEDDING]  # a tied head
        yield tensors[place.path].matrix(_on_host(parameters[place.path].get_value(), place.number))


def _on_host(value: Float[Array, "..."], number: int | None) -> Shaped[np.ndarray, "..."]:
    """A parameter, or one of a stack, gathered from all devices and processes."""
    # Whole parameters are copied too: an array keeps the NumPy value it once gave, and the model's would fill the host.
    part = jnp.copy(value) if number is None else _take(value, number)
    return (
        np.asarray(part)
        if part.is_fully_addressable
        else multihost_utils.process_allgather(part, tiled=True)
    )


@jax.jit
def _take(stack: Float[Array, "l ..."], number: Int[Array, ""]) -> Float[Array, "..."]:
    return jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)
