"""The model of a run that starts from published weights, or from those that another run has left in its folder `model`.

Owns the agreement of a checkpoint's folder with the recipe and with its tokenizer. Refuses, before any weights are read, a folder of
another size and a vocabulary that the model does not know. Invariant: equal weights have equal fingerprints.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from models.qwen3_vl.config import Qwen3VLConfig, qwen3_vl, tiny
from models.qwen3_vl.hf_config import from_hf
from models.weights.folder import CONFIG, local_folder, read_companions, weights_files
from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.stored_settings import require_same
from paravt_jax.method import tokenizer
from paravt_jax.method.tokenizer import Vocabulary
from rollout.evaluation.provenance import weights_hash
from train.durable import hosts


def config_of(path: str, size: str) -> Qwen3VLConfig:
    """The configuration in a folder or at a hub id. ValueError, with every difference, where it is not that of the recipe's size."""
    found = from_hf(local_folder(path, weights=False) / CONFIG)
    sizes = tiny(found.text.vocab_size) if size == "tiny" else qwen3_vl(size)
    there, wanted = (
        {name: dataclasses.asdict(getattr(c, name)) for name in ("text", "vision")}
        for c in (found, sizes)
    )
    require_same(
        f"model.path: {path} is not of model.size {size}",
        there,
        wanted,
        "Give the size of these weights, or the weights of this size.",
    )
    return found


def require_weights(path: str) -> None:
    """Fetches the weights where `path` is a hub id. FileNotFoundError where there are none: it is known before data is prepared."""
    weights_files(local_folder(path))


def check_vocabulary(config: Qwen3VLConfig, vocabulary: Vocabulary, path: str) -> None:
    """Raises ValueError where a tokenizer has words that the model has no rows for, or another id for a token of frames."""
    if vocabulary.size > config.text.vocab_size:
        raise ValueError(
            f"model.path: {path} has a tokenizer of {vocabulary.size} words and rows for {config.text.vocab_size}; its tokenizer.json is "
            "another model's, fetch it again"
        )
    names = {
        "image": "image_pad",
        "video": "video_pad",
        "vision_start": "vision_start",
        "vision_end": "vision_end",
    }
    for field, token in names.items():
        if (asked := getattr(config, f"{field}_token_id")) != vocabulary[f"<|{token}|>"]:
            raise ValueError(
                f"model.path: {path} has <|{token}|> as {vocabulary[f'<|{token}|>']} in its tokenizer and as {asked} in its config.json; "
                "one of the two is another model's, fetch them again"
            )


def fingerprint(path: str) -> str:
    """Of the weights, by their content: what another checkpoint under the same name does not share. The first process reads it all; of
    the others' copies it is compared what says which they are. ValueError where they differ."""
    folder = local_folder(path)
    hosts.require_same(
        f"model.path: {path}, its files",
        {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))},
    )
    hosts.require_same(f"model.path: {path}, its {CONFIG}", (folder / CONFIG).read_text())
    return hosts.from_first(lambda: weights_hash(folder))


def on_host(weights: Any) -> Any:
    """NumPy copies of arrays on the mesh, in every process, one at a time."""
    return jax.tree.map(
        lambda x: (
            np.asarray(x)
            if x.is_fully_replicated
            else multihost_utils.process_allgather(x, tiled=True)
        ),
        weights,
    )


def copy_tokenizer(source: str, target: pathlib.Path) -> None:
    """What belongs to the tokenizer and the processor of a checkpoint; `tokenizer.json` last, for it marks the folder as whole."""
    companions = read_companions(local_folder(source, weights=False))
    files = {
        name: text
        for name, text in companions.items()
        if name != CONFIG and not name.endswith(".index.json")
    }
    target.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: name == tokenizer.FILE):
        if not (target / tokenizer.FILE).exists():
            write_atomically(target / name, files[name].decode())
