"""A folder in the Hugging Face layout: weights files and their index, and the config, tokenizer and processor files beside them.

Owns where such a folder comes from (a path, the hub), which files it is made of, and how a new one appears. Knows names and shapes of
tensors, nothing of the model. Refuses folders with files or tensors missing, all named in one error. Invariant: a folder that `appearing`
made is whole, whenever the writer died.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
from huggingface_hub import errors

from models.weights.tensor_file import Header, new_header, read_header

CONFIG, GENERATION = "config.json", "generation_config.json"
_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "LICENSE*")  # config, tokenizer, template, processor
_YOUNG = 60.0  # seconds in which a writer is sure to have locked the folder it made

Shape = tuple[int, ...]


def local_folder(source: str | os.PathLike, *, weights: bool = True) -> Path:
    """The folder `source`, or that of a hub id once fetched into the hub's cache, without `weights` where they are not needed.

    FileNotFoundError where there is neither, and for a run's directory, whose model lies in a folder of its own.
    """
    folder = Path(source)
    if (folder / "model" / CONFIG).exists() and not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(
            f"{source}: holds no weights; the model lies in {folder / 'model'}, give that"
        )
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(source)):
        raise FileNotFoundError(
            f"{source}: no such folder, and no hub id (owner/name); give the folder of a Qwen3-VL checkpoint"
        )
    try:
        return Path(
            huggingface_hub.snapshot_download(
                str(source), allow_patterns=["*.safetensors"] * weights + [*_COMPANIONS]
            )
        )
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"{source}: no such folder here, and the hub did not give it ({error}); check the id, the network and the token "
            "(hf auth login), or fetch the repository elsewhere and give its folder"
        ) from error


def read_headers(
    folder: Path, shapes: Mapping[str, Shape], optional: Mapping[str, Shape]
) -> dict[str, Header]:
    """File name -> header of every weights file, which together hold each tensor of `shapes` once, perhaps those of `optional`, no others.

    FileNotFoundError without weights; ValueError naming a damaged file, or every tensor that is missing, unknown, of another shape or
    there twice.
    """
    headers = {name: read_header(folder / name) for name in weights_files(folder)}
    _check(folder, headers.values(), shapes, optional)
    return headers


def weights_files(folder: Path) -> list[str]:
    """Names of the files that hold a checkpoint's weights. FileNotFoundError where there are none."""
    if (folder / _FILE).exists():  # before the index, as in transformers
        return [_FILE]
    index = folder / _INDEX
    if not index.exists():
        raise FileNotFoundError(
            f"{folder}: holds neither {_FILE} nor {_INDEX}; give the folder of a Qwen3-VL checkpoint"
        )
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        strange = [name for name in names if Path(name).name != name]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index}: has no readable weight_map ({error!r}); fetch it again"
        ) from error
    if strange:
        raise ValueError(
            f"{index}: weight_map names {strange[0]!r}; weights lie beside their index: give plain file names"
        )
    if missing := [name for name in names if not (folder / name).exists()]:
        raise FileNotFoundError(
            f"{folder}: lacks {', '.join(missing)}, named in {_INDEX}; fetch what is missing"
        )
    return names


def _check(
    folder: Path,
    headers: Iterable[Header],
    shapes: Mapping[str, Shape],
    optional: Mapping[str, Shape],
) -> None:
    stored = [(name, tensor.shape) for header in headers for name, tensor in header.tensors.items()]
    found, counts = dict(stored), Counter(name for name, _ in stored)
    wanted = {**shapes, **{name: shape for name, shape in optional.items() if name in found}}
    problems = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unknown": sorted(found.keys() - wanted.keys()),
        "misshaped": [
            f"{n} {found[n]}, not {wanted[n]}"
            for n in sorted(wanted.keys() & found.keys())
            if found[n] != wanted[n]
        ],
        "twice": sorted(name for name, count in counts.items() if count > 1),
    }
    if lines := [
        f"{len(names)} {kind}: {', '.join(names)}" for kind, names in problems.items() if names
    ]:
        raise ValueError(
            f"{folder}: tensors differ from the configuration's; {'; '.join(lines)}; check config.json and the model's size"
        )


def read_companions(folder: Path) -> dict[str, bytes]:
    """The contents of all that belongs to a checkpoint beside its weights: config, tokenizer, template, processor, index, licence."""
    used = set() if (folder / _FILE).exists() else {_INDEX}
    unused = {
        path.name for path in folder.glob("*.index.json")
    } - used  # of other formats' weights, which stay behind
    paths = {
        path
        for pattern in _COMPANIONS
        for path in folder.glob(pattern)
        if path.is_file() and path.name not in unused
    }
    return {path.name: path.read_bytes() for path in sorted(paths)}


def new_files(
    configs: Mapping[str, Mapping[str, Any]],
    tensors: Mapping[str, tuple[np.dtype, Shape]],
    max_bytes: int,
) -> tuple[dict[str, Header], dict[str, bytes]]:
    """Headers of weights files that hold `tensors`, and contents of the configs and the index.

    A file holds at most `max_bytes` of tensors, or one tensor. `configs`: config.json and others
    like it, by name.
    """
    parts: list[dict[str, tuple[np.dtype, Shape]]] = []
    room = total = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        if not parts or size > room:
            parts.append({})
            room = max_bytes
        parts[-1][name] = (dtype, shape)
        room, total = room - size, total + size
    companions = {name: _json(content) for name, content in configs.items()}
    names = (
        [f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
        if len(parts) > 1
        else [_FILE]
    )
    if len(parts) > 1:
        where = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        companions[_INDEX] = _json({"metadata": {"total_size": total}, "weight_map": where})
    return {name: new_header(part) for name, part in zip(names, parts, strict=True)}, companions


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A hidden folder to fill, which becomes `folder` when the block ends well and vanishes when it fails.

    First removes what killed writers of the same folder left more than a minute ago; a living one keeps its lock, and its files. Where
    the file system has no locks, nothing is removed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix, suffix = f".{folder.name}.", ".partial"
    for path in folder.parent.iterdir():
        middle = path.name[len(prefix) : -len(suffix)]
        if path.name == f"{prefix}{middle}{suffix}" and "." not in middle and _abandoned(path):
            shutil.rmtree(path, ignore_errors=True)  # another writer may be at it too
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=prefix, suffix=suffix))
    lock = os.open(temporary, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # no locks here
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it when the process dies
        yield temporary
        temporary.chmod(0o755)
        for path in (*temporary.iterdir(), temporary):
            _sync(path)  # a name must not survive a power failure that its content did not
        os.replace(temporary, folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _abandoned(path: Path) -> bool:
    """Whether a writer's folder is a dead one's: not locked, and too old to be about to be. Not where that cannot be found out."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return time.time() - os.fstat(descriptor).st_mtime > _YOUNG
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
