"""A small vocabulary in the Hugging Face `tokenizers` format, with the added tokens of Qwen3-VL."""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paravt_jax.method.tokenizer import EOS, FILE, PAD, byte_characters

# The added tokens of Qwen3-VL in the order of their ids (151643 to 151668), with their `special` flag.
_SPECIAL = (
    *(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|object_ref_start|>",
        "<|object_ref_end|>",
        "<|box_start|>",
        "<|box_end|>",
    ),
    *(
        "<|quad_start|>",
        "<|quad_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ),
)
_ADDED = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<|fim_prefix|>",
        "<|fim_middle|>",
        "<|fim_suffix|>",
        "<|fim_pad|>",
        "<|repo_name|>",
    ),
    *("<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)

_BYTE_SCORE, _PIECE_SCORE = (
    -10.0,
    -1.0,
)  # a piece never costs more than one byte, so the best segmentation has the fewest tokens


def build_tokenizer(pieces: Iterable[str]) -> tokenizers.Tokenizer:
    """A small tokenizer: all 256 bytes, the given pieces as one token each, and the added tokens of Qwen3-VL.

    Added tokens inside a piece split it, since they are always tokens of their own. Of several ways to cut a text the one
    with the fewest pieces is taken, so a piece is used whole wherever it occurs unless a longer one covers it. Any UTF-8 text round-trips.
    """
    added = re.compile("|".join(map(re.escape, _SPECIAL + _ADDED)))
    parts = dict.fromkeys(part for piece in pieces for part in added.split(piece) if part)
    coded = dict.fromkeys(
        "".join(byte_characters()[byte] for byte in part.encode()) for part in parts
    )
    vocabulary = [(c, _PIECE_SCORE if c in coded else _BYTE_SCORE) for c in byte_characters()]
    vocabulary += [(c, _PIECE_SCORE) for c in coded if len(c) > 1]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(t, special=True, normalized=False) for t in _SPECIAL]
    )
    tokenizer.add_tokens(
        [tokenizers.AddedToken(t, special=False, normalized=False) for t in _ADDED]
    )
    return tokenizer


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: str | os.PathLike) -> pathlib.Path:
    """Writes `tokenizer.json` into the folder, whole or not at all, and returns its path; what transformers reads beside it comes first."""
    path = pathlib.Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": PAD}
    (path.parent / "tokenizer_config.json").write_text(
        json.dumps(beside, indent=2) + "\n", encoding="utf-8"
    )
    unfinished = path.with_suffix(".tmp")
    tokenizer.save(str(unfinished))
    os.replace(unfinished, path)
    return path
