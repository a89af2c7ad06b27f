"""Checks and reads the folder of weights that a run starts from.

The folder is a published checkpoint, or the folder `model` of another run. Sizes and vocabulary are
checked before any weights are read.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from models.config import ModelConfig
from models.peft_folder import ADAPTER_CONFIG
from models.weights.folder import CONFIG, local_folder, read_companions, require_readable
from models.weights.hf_config import from_hf
from paravt_jax.data import tokenizer_file
from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.file_sums import SUMS
from paravt_jax.data.stored_settings import require_same
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.processes import hosts
from rollout.evaluation.weights_hash import weights_hash
from train.settings import ModelSettings


def config_of(path: str, model: ModelSettings) -> ModelConfig:
    """Read the configuration of a model.

    Args:
        path: Folder or Hugging Face id.
        model: The recipe's `model`.

    Raises:
        ValueError: If the folder holds adapters, or if the configuration is not that of `model`;
            lists the fields that differ.
    """
    folder = local_folder(path, weights=False)
    if (folder / ADAPTER_CONFIG).exists() and not (folder / CONFIG).exists():
        raise ValueError(
            f"model.path: {path} holds adapters only, and a run begins with whole weights; give "
            "the folder model of their run, where they are merged (elsewhere, merge_and_unload of "
            "PEFT merges them), or their base"
        )
    found = from_hf(folder / CONFIG)
    if found.family != model.family:
        raise ValueError(
            f"model.path: {path} is of the family {found.family}, and model.family is "
            f"{model.family}; change model.family, and model.size with it"
        )
    require_same(
        f"model.path: {path} is not of model.size {model.size}",
        _sizes(found),
        # A tiny model has the vocabulary of its world.
        _sizes(model.config(found.text.vocab_size)),
        "Change model.size or model.path so that they match.",
    )
    return found


def _sizes(config: ModelConfig) -> dict[str, Any]:
    return {"text": dataclasses.asdict(config.text), "vision": dataclasses.asdict(config.vision)}


def require_weights(path: str) -> None:
    """Download the weights if `path` is a Hugging Face id.

    A run calls this before it prepares data, which can take hours.

    Raises:
        FileNotFoundError: If there are no weights.
        ValueError: If a file of weights is damaged.
    """
    require_readable(local_folder(path))


def check_vocabulary(config: ModelConfig, vocabulary: Vocabulary, path: str) -> None:
    """Check that a tokenizer belongs to a model.

    Args:
        config: The model's configuration.
        vocabulary: The tokenizer's vocabulary.
        path: The run's `model.path`, for the error message.

    Raises:
        ValueError: If the vocabulary is larger than the model's embedding, or if the two have
            different ids for the special tokens of frames.
    """
    if vocabulary.size > config.text.vocab_size:
        raise ValueError(
            f"model.path: {path} has a tokenizer with {vocabulary.size} tokens, but its model has "
            f"only {config.text.vocab_size}; "
            "tokenizer.json belongs to another model: download it again"
        )
    config.require_ids(vocabulary.visual_ids, f"model.path: {path}, ")


def fingerprint(path: str) -> str:
    """Hash the contents of the weights, so that another checkpoint at the same path is noticed.

    Raises:
        ValueError: If the processes of a run have different copies.
    """
    folder = local_folder(path)
    # Every process may have its own copy. Hashing a large model takes minutes, so only the first
    # process does it; the other copies are compared by file sizes and configuration.
    hosts.require_same(
        f"model.path: {path}, its files",
        {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))},
    )
    hosts.require_same(f"model.path: {path}, its {CONFIG}", (folder / CONFIG).read_text())
    return hosts.from_first(lambda: weights_hash(folder))


def on_host(weights: Any) -> Any:
    """Copy a tree of arrays from the mesh to NumPy arrays, in every process."""

    def copy(array: jax.Array) -> np.ndarray:
        if array.is_fully_replicated:
            return np.asarray(array)
        # A process only sees its own shards; gathering one array at a time bounds the memory.
        return multihost_utils.process_allgather(array, tiled=True)

    return jax.tree.map(copy, weights)


def copy_tokenizer(source: str, target: pathlib.Path) -> None:
    """Copy the tokenizer's and processor's files of a checkpoint, unless they are already there.

    Args:
        source: Folder or Hugging Face id of the checkpoint.
        target: Folder to copy to.
    """
    target.mkdir(parents=True, exist_ok=True)
    if (target / tokenizer_file.FILE).exists():
        return
    companions = read_companions(local_folder(source, weights=False))
    # Also without the checksums of weights, which stay behind.
    left = (CONFIG, SUMS)
    names = [name for name in companions if name not in left and not name.endswith(".index.json")]
    # tokenizer.json goes last: it marks the folder as complete.
    for name in sorted(names, key=lambda name: name == tokenizer_file.FILE):
        write_atomically(target / name, companions[name].decode())
