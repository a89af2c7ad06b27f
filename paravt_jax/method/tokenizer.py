"""Text to token ids and back, for the real tokenizer and for a small one of our own.

Owns two things: `build`, a small vocabulary in the Hugging Face `tokenizers` format, and `Vocabulary`, the one face that any
such tokenizer shows to the rest of the project. Refuses to template chats: that is the protocol's.
Invariant: `decode(ids)` is the bytes of the tokens put together, so every byte of a decoded text belongs to exactly one token.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers
from jaxtyping import Int32
from tokenizers import decoders, models, pre_tokenizers

FILE = "tokenizer.json"

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
PAD, EOS = "<|endoftext|>", "<|im_end|>"

_BYTE_SCORE, _PIECE_SCORE = (
    -10.0,
    -1.0,
)  # a piece never costs more than one byte, so the best segmentation has the fewest tokens


@functools.cache
def _byte_characters() -> tuple[str, ...]:
    """The printable character that stands for each byte in byte-level vocabularies (the GPT-2 map)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    moved = {byte: chr(256 + n) for n, byte in enumerate(others)}
    return tuple(moved.get(byte, chr(byte)) for byte in range(256))


@functools.cache
def _character_bytes() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(_byte_characters())}


def build(pieces: Iterable[str]) -> tokenizers.Tokenizer:
    """A small tokenizer: all 256 bytes, the given pieces as one token each, and the added tokens of Qwen3-VL.

    Added tokens inside a piece split it, since they are always tokens of their own. Of several ways to cut a text the one
    with the fewest pieces is taken, so a piece is used whole wherever it occurs unless a longer one covers it. Any UTF-8 text round-trips.
    """
    added = re.compile("|".join(map(re.escape, _SPECIAL + _ADDED)))
    parts = dict.fromkeys(part for piece in pieces for part in added.split(piece) if part)
    coded = dict.fromkeys(
        "".join(_byte_characters()[byte] for byte in part.encode()) for part in parts
    )
    vocabulary = [(c, _PIECE_SCORE if c in coded else _BYTE_SCORE) for c in _byte_characters()]
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


def save(tokenizer: tokenizers.Tokenizer, folder: str | os.PathLike) -> pathlib.Path:
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


def load(path: str | os.PathLike) -> Vocabulary:
    """The vocabulary of a `tokenizer.json`, or of the folder that holds one. Raises FileNotFoundError, or ValueError for another format."""
    file = pathlib.Path(path)
    file = file / FILE if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(
            f"tokenizer: {file} does not exist; give a {FILE} or a folder that holds one"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"tokenizer: {file} is not in the Hugging Face tokenizers format ({error})"
        ) from error
    return Vocabulary(tokenizer)


class Vocabulary:
    """A byte-level tokenizer as the project uses it: ids, texts and the bytes of every token."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self.tokenizer = tokenizer
        self._ids = tokenizer.get_vocab(with_added_tokens=True)
        self._bytes = self._table()
        self.pad, self.eos = self[PAD], self[EOS]

    def _table(self) -> tuple[bytes, ...]:
        added = {
            id: token.content for id, token in self.tokenizer.get_added_tokens_decoder().items()
        }
        characters = _character_bytes()
        table = [b""] * self.size
        for text, id in self._ids.items():
            table[id] = added[id].encode() if id in added else bytes(characters[c] for c in text)
        return tuple(table)

    @property
    def size(self) -> int:
        """Ids run from 0 to size - 1; a model may have more embedding rows."""
        return max(self._ids.values()) + 1

    @functools.cached_property
    def digest(self) -> str:
        """A fingerprint of every token and its id."""
        return hashlib.blake2b(
            json.dumps(sorted(self._ids.items())).encode(), digest_size=8
        ).hexdigest()

    @functools.cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The texts that are tokens of their own wherever they stand, by id."""
        return tuple(
            token.content for _, token in sorted(self.tokenizer.get_added_tokens_decoder().items())
        )

    def __getitem__(self, token: str) -> int:
        """The id of an added token by its text, such as `<think>`."""
        if token not in self._ids:
            raise KeyError(
                f"tokenizer: no token {token!r}; a vocabulary needs the added tokens of Qwen3-VL"
            )
        return self._ids[token]

    def encode(self, text: str) -> Int32[np.ndarray, " t"]:
        """The ids of the text. Added tokens in it are recognised; nothing is put around it."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def token_bytes(self, id: int) -> bytes:
        """What one token stands for: its UTF-8 bytes (perhaps part of a character); none for an id that is not in use."""
        return (
            self._bytes[id] if id < len(self._bytes) else b""
        )  # a model may have more embedding rows

    def decode(self, ids: Sequence[int] | Int32[np.ndarray, " t"]) -> str:
        """The text of the ids, added tokens included; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(id) for id in np.asarray(ids).tolist()).decode(
            "utf-8", errors="replace"
        )
