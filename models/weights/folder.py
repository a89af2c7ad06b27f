"""Folders in the Hugging Face layout: weights files with their index, config, tokenizer, processor.

A folder comes from a path or the hub. This module reads and writes names, shapes and files of
tensors. It does not depend on the model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import split_state_dict_into_shards_factory

from models.weights.tensor_file import Shape, Tensor, TensorType, read_header, swapped
from paravt_jax.data import foreign, sources
from paravt_jax.data.any_path import is_address, require_expanded
from paravt_jax.data.buckets import fetch_folder
from paravt_jax.data.foreign import ForeignFileError, shortened
from paravt_jax.data.frames import is_inside
from paravt_jax.data.stored import require_undamaged

CONFIG = "config.json"
GENERATION = "generation_config.json"
_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LONGEST_NAME = 200  # characters
# Upper bound on the tensors that an error lists.
_NAMED = 50
# Config, tokenizer, chat template, processor, licence.
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "LICENSE*")
# Containers that the names of tensors have or lack, depending on the version of transformers and on
# what wrapped the model when it was saved. So do those that begin with an underscore.
_CONTAINERS = {"model", "language_model", "base_model", "module", "default", "modules_to_save"}
NO_BIN = "no other format is read: .bin can run code, .gguf is quantized"
MERGE = "merge them with PEFT (merge_and_unload), and load the merged folder"
"""What to do about adapters that cannot be read."""


def plain_name(name: str) -> str:
    """Return a tensor's name without containers, which is the same whatever tool wrote it.

    `model.language_model.layers.0.mlp.up_proj.weight` and `model.layers.0.mlp.up_proj.weight` are
    `layers.0.mlp.up_proj.weight`.
    """
    parts = name.split(".")
    return ".".join(part for part in parts if part[:1] != "_" and part not in _CONTAINERS)


def local_folder(source: str | os.PathLike, *, weights: bool = True) -> Path:
    """Return the folder of a checkpoint, downloaded into a cache if `source` is not on this
    machine.

    Args:
        source: a folder, a hub id such as `Qwen/Qwen3-VL-8B-Instruct`, or the address of a folder
            (gs://..., s3://...).
        weights: whether a download includes the weights.

    Raises:
        FileNotFoundError: there is no such folder, id or address, or the wanted weights are in
            subfolders, as in the directory of a run or in the hub's cache.
        ConnectionError: a file cannot be fetched.
    """
    require_expanded("model", source)
    patterns = [*_COMPANIONS, "*.safetensors"] if weights else _COMPANIONS
    if is_address(source):
        return fetch_folder(os.fspath(source), patterns)
    folder = Path(source)
    below = [*folder.glob("*/*.safetensors"), *folder.glob("snapshots/*/*.safetensors")]
    if weights and below and not any(folder.glob("*.safetensors")):
        newest = max((file.parent for file in below), key=lambda path: path.stat().st_mtime)
        raise FileNotFoundError(f"{source}: has no weights itself; give {newest}, the newest in it")
    if folder.is_dir():
        return folder
    if folder.name == "model" and (folder.parent / "checkpoints").is_dir():
        raise FileNotFoundError(
            f"{source}: no such folder; the run {folder.parent} writes it at its end: finish it, "
            "or export a checkpoint with python -m train.export"
        )
    return sources.snapshot(str(source), patterns)


def read_headers(
    folder: Path, shapes: Mapping[str, Shape], optional: Mapping[str, Shape]
) -> dict[str, Tensor]:
    """Read the headers of all weights files, and check that they hold the expected tensors.

    Args:
        folder: the folder of a checkpoint.
        shapes: name -> shape of every tensor, each of which must occur once.
        optional: name -> shape of tensors that may also occur.

    Returns:
        The tensors, by name.

    Raises:
        FileNotFoundError: there are no weights.
        ValueError: a file is damaged; or the list of all tensors that are missing, unknown, of
            another shape, or there twice.
    """
    tensors = [x for name in weights_files(folder) for x in read_header(folder / name).values()]
    found, differences = match_tensors(tensors, shapes, optional)
    require_none(folder, differences, "check config.json and the model's size")
    return found


def has_weights(folder: Path) -> bool:
    """Return whether a folder has the weights of a whole model."""
    return (folder / _FILE).exists() or (folder / _INDEX).exists()


def weights_files(folder: Path) -> list[str]:
    """Return the names of a checkpoint's weights files. FileNotFoundError if there are none."""
    # The single file goes before the index, as in transformers.
    if (folder / _FILE).exists():
        return [_FILE]
    index = folder / _INDEX
    if not index.exists():
        raise FileNotFoundError(
            f"{folder}: has neither {_FILE} nor {_INDEX}, and {NO_BIN}; give the folder of a "
            "supported model, or open this one with transformers and save it again"
        )
    weight_map = foreign.read_object(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    # A path could lead out of the folder.
    if not names or not all(map(_is_plain_name, names)):
        raise ValueError(
            f"{index}: weight_map gives no plain names of files in the index's folder; fetch it "
            "again"
        )
    names = sorted(set(names))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"{folder}: lacks {', '.join(missing)}, named in {_INDEX}; fetch what is missing"
        )
    return names


def _is_plain_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name and len(name) <= _LONGEST_NAME


def require_readable(folder: Path) -> None:
    """Raise as `read_headers` does if a weights file is missing, damaged, or only a pointer."""
    for name in weights_files(folder):
        read_header(folder / name)


def match_tensors(
    tensors: Iterable[Tensor], shapes: Mapping[str, Shape], optional: Mapping[str, Shape]
) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Find the expected tensors, by the names of any tool.

    Args:
        tensors: the tensors of all files.
        shapes: see `read_headers`.
        optional: see `read_headers`.

    Returns:
        The tensors, by expected name; and kind of difference -> the tensors that differ so.
    """
    expected = {**shapes, **optional}
    names = {plain_name(name): name for name in expected}
    found: dict[str, Tensor] = {}
    differences: dict[str, list[str]] = {"unknown": [], "misshaped": [], "empty": [], "twice": []}
    for tensor in tensors:
        name = names.get(plain_name(tensor.name))
        if name is None:
            differences["unknown"].append(tensor.name)
        elif name in found:
            differences["twice"].append(name)
        elif 0 in tensor.shape:
            differences["empty"].append(tensor.name)
        elif tensor.shape not in (expected[name], swapped(name, expected[name])):
            differences["misshaped"].append(f"{name} {tensor.shape}, not {expected[name]}")
        if name is not None:
            found[name] = tensor
    return found, {"missing": [name for name in shapes if name not in found], **differences}


def require_none(folder: Path, differences: Mapping[str, list[str]], remedy: str) -> None:
    """Raise ValueError if the tensors of a folder differ from those that are expected.

    Args:
        folder: the folder.
        differences: see `match_tensors`.
        remedy: what to do, unless what differs calls for something else.
    """
    if differences["empty"]:
        remedy = "ZeRO-3 kept them apart: save with stage3_gather_16bit_weights_on_model_save"
    elif differences["twice"]:
        remedy = "save or fetch them again, into a new folder"
    elif not differences["misshaped"] and any(".lora_" in name for name in differences["unknown"]):
        remedy = f"only layers of the decoder may have adapters, in a folder of their own: {MERGE}"
    lists = [
        f"{len(names)} {kind}: {_listed(names)}" for kind, names in differences.items() if names
    ]
    if lists:
        raise ValueError(
            f"{folder}: tensors differ from the configuration's; {'; '.join(lists)}; {remedy}"
        )


def _listed(names: Sequence[str]) -> str:
    """Return the first names of a list, each shortened. There may be thousands, of any length."""
    shown = [shortened(name) for name in sorted(names)[:_NAMED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def read_companions(folder: Path) -> dict[str, bytes]:
    """Map file names to the content of everything beside the weights.

    That is config, tokenizer, chat template, processor, index and licence.
    """
    # Indexes of weights that were not read, for example those of other formats, stay behind.
    used = set() if (folder / _FILE).exists() else {_INDEX}
    unused = {path.name for path in folder.glob("*.index.json")} - used
    paths = {path for pattern in _COMPANIONS for path in folder.glob(pattern) if path.is_file()}
    wanted = [path for path in sorted(paths) if path.name not in unused]
    # Files are copied, so a link must not lead out of the model's folder.
    for path in wanted:
        if not is_inside(path.resolve(), folder):
            raise ForeignFileError(
                f"{path}: a link to {path.resolve()}, outside the model's folder; copy or remove it"
            )
    require_undamaged(folder, [path.name for path in wanted])
    return {path.name: foreign.read_bytes(path) for path in wanted}


def new_files(
    tensors: Mapping[str, TensorType], max_bytes: int
) -> tuple[dict[str, dict[str, TensorType]], dict[str, bytes]]:
    """Divide the tensors of a new checkpoint over files.

    Args:
        tensors: type and shape of each tensor, by name, in the order to write them.
        max_bytes: size limit of a weights file, in bytes of tensors. A larger tensor gets a file of
            its own.

    Returns:
        The tensors of each weights file, and the content of the index if there are several, both by
        file name.
    """
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda x: math.prod(x[1]) * x[0].itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    files = {
        file: {name: tensors[name] for name in names}
        for file, names in split.filename_to_tensors.items()
    }
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    return files, {_INDEX: to_json(index)} if split.is_sharded else {}


def to_json(content: Mapping[str, Any]) -> bytes:
    """Return the content of a JSON file, as transformers and PEFT write it."""
    return (json.dumps(content, indent=2) + "\n").encode()


def weights_hash(folder: Path) -> str:
    """Hash the content of a checkpoint: its weights, their configuration and tokenizer.json.

    A copied or moved checkpoint keeps its hash.
    """
    total = hashlib.blake2b(digest_size=16)
    others = [folder / name for name in ("config.json", "tokenizer.json", "adapter_config.json")]
    for file in sorted([*folder.glob("*.safetensors"), *others]):
        if file.exists():
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16))
            total.update(file.name.encode() + b"\0" + content.digest())
    return total.hexdigest()
