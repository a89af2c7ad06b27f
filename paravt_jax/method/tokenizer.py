"""`Vocabulary` converts text to token ids and back, with a Hugging Face tokenizer.

`decode(ids)` joins the bytes of the tokens, so every byte of a decoded text belongs to exactly one
token. struct(o) relies on that.
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
from jaxtyping import Int, Int32

FILE = "tokenizer.json"

PAD = "<|endoftext|>"
EOS = "<|im_end|>"


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """The printable character for each byte in byte-level vocabularies (GPT-2's map)."""
    # Printable bytes of Latin-1 represent themselves; the others, in order, take 256, 257, ...
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    moved = {byte: chr(256 + n) for n, byte in enumerate(others)}
    return tuple(moved.get(byte, chr(byte)) for byte in range(256))


@functools.cache
def _character_bytes() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_characters())}


def load(path: str | os.PathLike) -> Vocabulary:
    """Load a vocabulary.

    Args:
        path: A `tokenizer.json`, or a folder with one.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file has another format.
    """
    file = pathlib.Path(path)
    if file.is_dir():
        file = file / FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"tokenizer: {file} does not exist; give a {FILE} or a folder that holds one"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"tokenizer: {file} is not in the Hugging Face tokenizers format ({error}); fetch it "
            "again"
        ) from error
    return Vocabulary(tokenizer)


class Vocabulary:
    """A byte-level tokenizer: ids, texts and the bytes of every token.

    >>> vocabulary = load("models/Qwen3-VL-8B-Instruct")
    >>> vocabulary.decode(vocabulary.encode("so</think>"))
    'so</think>'
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self.tokenizer = tokenizer
        self._ids = tokenizer.get_vocab(with_added_tokens=True)
        self._bytes = self._bytes_by_id()
        self.pad = self[PAD]
        self.eos = self[EOS]

    def _bytes_by_id(self) -> tuple[bytes, ...]:
        added = self.tokenizer.get_added_tokens_decoder()
        characters = _character_bytes()
        table = [b""] * self.size
        for text, id in self._ids.items():
            # Added tokens are stored as plain text, others as GPT-2's printable characters.
            if id in added:
                table[id] = added[id].content.encode()
            else:
                table[id] = bytes(characters[c] for c in text)
        return tuple(table)

    @property
    def size(self) -> int:
        """Number of ids. A model's embedding may have more rows."""
        return max(self._ids.values()) + 1

    @functools.cached_property
    def digest(self) -> str:
        """Fingerprint of all tokens and their ids."""
        data = json.dumps(sorted(self._ids.items())).encode()
        return hashlib.blake2b(data, digest_size=8).hexdigest()

    @functools.cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The texts that `encode` always turns into a single token, in the order of their ids."""
        added = self.tokenizer.get_added_tokens_decoder()
        return tuple(token.content for _, token in sorted(added.items()))

    def __getitem__(self, token: str) -> int:
        """The id of an added token, such as `<think>`."""
        if token not in self._ids:
            raise KeyError(f"tokenizer: no token {token!r}; use the tokenizer of a supported model")
        return self._ids[token]

    def encode(self, text: str) -> Int32[np.ndarray, " t"]:
        """The ids of a text. Added tokens in it are recognised; no start or end token is added."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def token_bytes(self, id: int | np.integer) -> bytes:
        """The UTF-8 bytes of one token, which may be part of a character; empty for unused ids."""
        # A model can sample ids above the vocabulary, because its embedding may have more rows.
        return self._bytes[id] if id < len(self._bytes) else b""

    def decode(self, ids: Sequence[int | np.integer] | Int[np.ndarray, " t"]) -> str:
        """The text of ids, added tokens included. Invalid UTF-8 becomes U+FFFD."""
        data = b"".join(self.token_bytes(id) for id in np.asarray(ids).tolist())
        return data.decode("utf-8", errors="replace")
