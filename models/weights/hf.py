"""Loads and saves weights in the Hugging Face layout: safetensors files and a `config.json`.

transformers 4.57 and 5.x read and write the same folders. `load` reads back bit for bit what `save`
wrote. In both directions the host holds one tensor at a time beside the parameters themselves.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from models.config import ModelConfig
from models.family import family_of
from models.model import VisionLanguageModel, abstract_model
from models.sharding import param_shardings
from models.weights import folder as hf_folder
from models.weights import tensor_file
from models.weights.hf_config import from_hf, to_hf
from models.weights.hf_layout import (
    EMBEDDING,
    TIED_HEAD,
    TensorLayout,
    flat_parameters,
    tensor_layouts,
    tensor_places,
    tensor_types,
)
from models.weights.tensor_file import Tensor, TensorType
from paravt_jax.data import tokenizer_file
from paravt_jax.data.stored import appearing, require_undamaged, write_sums

_HEAD_ROWS = 1024  # rows of an output head in memory at a time

Files = Mapping[str, Mapping[str, TensorType]]
"""Type and shape of the tensors of each file that is written, by file name and name."""


def load(
    source: str | os.PathLike,
    config: ModelConfig | None = None,
    *,
    mesh: Mesh | None = None,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
) -> VisionLanguageModel:
    """Load a model.

    Every process of a mesh must call this. Each reads the slices that its own devices need.

        model = load("Qwen/Qwen3-VL-2B-Instruct", dtype=jnp.bfloat16)

    Args:
        source: a folder (with `model.safetensors`, or several files and their index) or a hub id.
        config: sizes of the model; None reads the folder's `config.json`.
        mesh: shards the weights by the rules of `models.sharding`; None: on one device.
        dtype: type of activations.
        param_dtype: type of the weights.

    Raises:
        FileNotFoundError: there are no weights, or the hub has no such id or is unreachable.
        ValueError: a file is damaged; or the list of all tensors that are missing, unknown, of
            another shape, or there twice; or an output head differs from an embedding that the
            configuration ties to it.
    """
    folder = hf_folder.local_folder(source)
    config = from_hf(folder / hf_folder.CONFIG) if config is None else config
    graph, state = nnx.split(abstract_model(config, dtype=dtype, param_dtype=param_dtype))
    parameters = flat_parameters(state)
    layouts = tensor_layouts(config)
    shapes = {name: place.shape for name, place in tensor_places(layouts, parameters).items()}
    embedding = layouts[EMBEDDING].name
    tied = config.text.tie_word_embeddings
    stored = hf_folder.read_headers(folder, shapes, {TIED_HEAD: shapes[embedding]} if tied else {})
    require_sound(folder, sorted({tensor.file.name for tensor in stored.values()}))
    if tied and TIED_HEAD in stored:
        _require_tied(stored[TIED_HEAD], stored[embedding])
    read_parameters(stored, layouts, state, mesh)
    return nnx.merge(graph, state)


def _require_tied(head: Tensor, embedding: Tensor) -> None:
    """Raise ValueError if a tied output head differs from the embedding, which is used for both.

    Tools that train the head may leave the configuration as it was. transformers 5 then uses both.
    """
    for first in range(0, head.shape[0], _HEAD_ROWS):
        rows = (slice(first, min(first + _HEAD_ROWS, head.shape[0])),)
        if not np.array_equal(head.read(rows), embedding.read(rows)):
            raise ValueError(
                f"{head.file}: {TIED_HEAD} differs from {embedding.name}, but tie_word_embeddings "
                f"= true in {hf_folder.CONFIG} says that they are one; set it to false there, also "
                "in text_config, to use both"
            )


def require_sound(folder: Path, files: Sequence[str]) -> None:
    """Raise ValueError if weights that `save` wrote are damaged; others have no sums.

    On several hosts every process reads a part of the files.
    """
    require_undamaged(folder, files[jax.process_index() :: jax.process_count()])


def read_parameters(
    stored: Mapping[str, Tensor],
    layouts: Mapping[str, TensorLayout],
    state: Any,
    mesh: Mesh | None,
) -> None:
    """Read the parameters of a state.

    Args:
        stored: the tensors of all files, by name.
        layouts: path of each parameter -> its tensor.
        state: an nnx state with the parameters' shapes and types; gets their values.
        mesh: see `load`.
    """
    parameters = flat_parameters(state)
    shardings: dict[str, NamedSharding] = {}
    if mesh:
        leaves = flat_parameters(param_shardings(state, mesh))
        shardings = {path: leaf.get_value() for path, leaf in leaves.items()}
    for path, layout in layouts.items():
        variable = parameters[path]
        value = _value(layout, stored, variable.shape, variable.dtype, shardings.get(path))
        variable.set_value(value)


def _value(
    layout: TensorLayout,
    stored: Mapping[str, Tensor],
    shape: tuple[int, ...],
    dtype: DTypeLike,
    sharding: NamedSharding | None,
) -> jax.Array:
    """Read one parameter."""
    # Wait for every transfer, because each transfer in the queue holds its host buffer.
    if not layout.stacked:
        value = _on_devices(layout, stored[layout.name], shape, sharding)
        return value.astype(dtype).block_until_ready()
    stack = jnp.zeros(shape, dtype, device=sharding)
    layer_sharding = None
    if sharding:
        # The sharding of one layer: without the stack's leading axis.
        layer_sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    # Donating the stack updates it in place: the devices never hold two copies of it.
    insert = jax.jit(_insert, donate_argnums=0, out_shardings=sharding)
    for number in range(shape[0]):
        value = _on_devices(layout, stored[layout.name.format(number)], shape[1:], layer_sharding)
        stack = insert(stack, value, number).block_until_ready()
    return stack


def _insert(
    stack: Float[Array, "l ..."], value: Float[Array, "..."], number: Int[Array, ""]
) -> Float[Array, "l ..."]:
    return jax.lax.dynamic_update_index_in_dim(stack, value.astype(stack.dtype), number, 0)


def _on_devices(
    layout: TensorLayout, stored: Tensor, shape: tuple[int, ...], sharding: NamedSharding | None
) -> jax.Array:
    """Read one tensor onto its devices, in the file's type."""
    if sharding is None:
        return jax.device_put(layout.read(stored, shape, (slice(None),) * len(shape)))
    # Replicas hold the same block, which is read once.
    blocks: dict[str, np.ndarray] = {}

    def block(index: Any) -> np.ndarray:
        key = repr(index)
        if key not in blocks:
            blocks[key] = layout.read(stored, shape, index)
        return blocks[key]

    return jax.make_array_from_callback(shape, sharding, block, dtype=stored.dtype)


def save(
    model: VisionLanguageModel,
    folder: str | os.PathLike,
    *,
    files: Iterable[str | os.PathLike] = (),
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a model to a new folder, for `load` and transformers. Weights keep their types.

    Every process of a mesh must call this, and must see `files`. The first one writes. A failure
    leaves nothing behind. A killed process leaves a hidden folder, which a later `save` to the same
    folder deletes.

    Args:
        model: the model to write.
        folder: the new folder.
        files: files to copy into the folder, such as a tokenizer. The stop and padding ids of a
            tokenizer.json go into config.json and a generation_config.json.
        max_shard_bytes: size limit of a weights file. A larger tensor gets a file of its own.

    Raises:
        FileExistsError: `folder` exists.
        RuntimeError: another process failed.
    """
    folder = Path(folder)
    files = [Path(file) for file in files]
    require_new(folder)
    layouts = tensor_layouts(model.config)
    parameters = flat_parameters(nnx.state(model, nnx.Param))
    tensors = tensor_types(layouts, parameters)
    weights, companions = hf_folder.new_files(tensors, max_shard_bytes)
    with _together(folder):
        configs = _configs(model.config, tensors[layouts[EMBEDDING].name][0].name, files)
        companions |= {name: hf_folder.to_json(content) for name, content in configs.items()}
        companions |= {file.name: file.read_bytes() for file in files}
    write_folder(folder, weights, companions, layouts, parameters)


def require_new(folder: Path) -> None:
    """Raise FileExistsError in every process if the folder exists."""
    # The first process decides: another may look when the folder is written already.
    if multihost_utils.broadcast_one_to_all(np.asarray(folder.exists())):
        raise FileExistsError(f"{folder}: exists; choose a new folder, or remove this one first")


def write_folder(
    folder: Path,
    weights: Files,
    companions: Mapping[str, bytes],
    layouts: Mapping[str, TensorLayout],
    parameters: Mapping[str, nnx.Variable],
) -> None:
    """Write parameters and other files to a new folder; see `save`, also for several processes.

    Args:
        folder: the new folder.
        weights: the tensors of each file of tensors.
        companions: file name -> content of the other files.
        layouts: path of each parameter -> its tensor.
        parameters: path -> parameter.
    """
    matrices = {file: _matrices(layouts, parameters, names) for file, names in weights.items()}
    with _together(folder):
        try:
            if jax.process_index() == 0:
                _write(folder, weights, matrices, companions)
        finally:
            # Gathering a parameter is a collective that every process must join, even if one has
            # failed. So exhaust the remaining generators.
            if jax.process_count() > 1:
                for rest in matrices.values():
                    collections.deque(rest, maxlen=0)


def _configs(config: ModelConfig, dtype: str, files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Map file names to the content of config.json, and of generation_config.json if there is a
    tokenizer.

    Special ids are where the published files have them. Without them, transformers' `generate`
    would not stop.
    """
    content: dict[str, Any] = to_hf(config) | {"dtype": dtype}
    file = next((file for file in files if file.name == tokenizer_file.FILE), None)
    if file is None:
        return {hf_folder.CONFIG: content}
    vocabulary = tokenizer_file.load(file, family_of(config).dialect)
    # No pad id here, as in the published files: with it transformers would freeze that embedding.
    content["text_config"] |= {"bos_token_id": vocabulary.pad, "eos_token_id": vocabulary.eos}
    generation = {
        "bos_token_id": vocabulary.pad,
        "pad_token_id": vocabulary.pad,
        "eos_token_id": [vocabulary.eos, vocabulary.pad],
    }
    return {hf_folder.CONFIG: content, hf_folder.GENERATION: generation}


@contextlib.contextmanager
def _together(folder: Path) -> Iterator[None]:
    """Raise RuntimeError in the other processes if the block fails in one.

    Otherwise they would wait forever in the next collective.
    """
    failed = True
    try:
        yield
        failed = False
    finally:
        failures = np.flatnonzero(multihost_utils.process_allgather(np.asarray(failed)))
    if failures.size:
        numbers = ", ".join(map(str, failures))
        raise RuntimeError(f"{folder}: not written; process {numbers} failed: see the error there")


def _write(
    folder: Path,
    weights: Files,
    matrices: Mapping[str, Iterable[Shaped[np.ndarray, "i j"]]],
    companions: Mapping[str, bytes],
) -> None:
    with appearing(folder) as temporary:
        for file, tensors in weights.items():
            tensor_file.write(temporary / file, tensors, matrices[file])
        for file, content in companions.items():
            (temporary / file).write_bytes(content)
        # Not of configs and templates, which people change. Last, because the companions may have
        # the sums of other weights.
        tokenizer = {tokenizer_file.FILE} & companions.keys()
        write_sums(temporary, [temporary / file for file in (*weights, *tokenizer)])


def _matrices(
    layouts: Mapping[str, TensorLayout],
    parameters: Mapping[str, nnx.Variable],
    names: Iterable[str],
) -> Iterator[Shaped[np.ndarray, "i j"]]:
    """Return the tensors of one file, each gathered when it is asked for."""
    places = tensor_places(layouts, parameters)
    for name in names:
        place = places[name]
        value = _on_host(parameters[place.path].get_value(), place.number)
        yield layouts[place.path].matrix(value)


def _on_host(value: Float[Array, "..."], number: int | None) -> Shaped[np.ndarray, "..."]:
    """Return a parameter, or one layer of a stack, gathered from all devices and processes."""
    # Copy whole parameters too: a jax.Array keeps the NumPy array that it was converted to, so
    # converting the model's own arrays would fill the host's memory.
    copy = jnp.copy(value) if number is None else _take(value, number)
    if copy.is_fully_addressable:
        return np.asarray(copy)
    return multihost_utils.process_allgather(copy, tiled=True)


@jax.jit
def _take(stack: Float[Array, "l ..."], number: Int[Array, ""]) -> Float[Array, "..."]:
    return jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)
