"""Reads and writes a `Vocabulary`, a file in the Hugging Face tokenizers format."""

from __future__ import annotations

import json
import os
import pathlib

import tokenizers

from paravt_jax.data.stored import require_undamaged, write_atomically
from paravt_jax.method.tokenizer import Dialect, Vocabulary

FILE = "tokenizer.json"


def load(path: str | os.PathLike, dialect: Dialect) -> Vocabulary:
    """Load a vocabulary.

    Args:
        path: A `tokenizer.json`, or a folder with one.
        dialect: That of the model's family.

    Raises:
        ValueError: The file does not exist, is damaged, or has another format.
    """
    file = pathlib.Path(path)
    if file.is_dir():
        file = file / FILE
    require_undamaged(file.parent, [file.name])
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"tokenizer: {file} is not a readable tokenizer ({error}); copy the {FILE} of the "
            "published model there, or that of the base"
        ) from error
    return Vocabulary(tokenizer, dialect)


def save(vocabulary: Vocabulary, folder: str | os.PathLike) -> pathlib.Path:
    """Write a tokenizer for transformers to a folder, and return the path of its tokenizer.json."""
    dialect = vocabulary.dialect
    path = pathlib.Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": dialect.end,
        "pad_token": dialect.pad,
    }
    config_file = path.parent / "tokenizer_config.json"
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # Last: if it exists, the folder is complete.
    write_atomically(path, vocabulary.tokenizer.to_str(pretty=True))
    return path
