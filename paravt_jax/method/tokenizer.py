"""Text to token ids and back: `Vocabulary`, the one face that a Hugging Face tokenizer shows to the project.

`decode(ids)` is the bytes of the tokens put together, so every byte of a decoded text belongs to exactly
one token. Prompts are the protocol's.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Sequence

import numpy as np
import tokenizers
from jaxtyping import Int32

FILE = "tokenizer.json"

PAD, EOS = "<|endoftext|>", "<|im_end|>"


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """The printable character that stands for each byte in byte-level vocabularies (the GPT-2 map)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    moved = {byte: chr(256 + n) for n, byte in enumerate(others)}
    return tuple(moved.get(byte, chr(byte)) for byte in range(256))


@functools.cache
def _character_bytes() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_characters())}


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
