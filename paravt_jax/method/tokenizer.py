"""`Vocabulary` converts text to token ids and back, with a Hugging Face tokenizer.

Its `Dialect` says how the family of the model writes a conversation with these tokens.

`decode(ids)` joins the bytes of the tokens, so every byte of a decoded text belongs to exactly one
token. struct(o) relies on that.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence

import numpy as np
import tokenizers
from jaxtyping import Int, Int32

from paravt_jax.method.parsing import CallSyntax


@dataclasses.dataclass(frozen=True)
class Dialect:
    """How a family of models writes a conversation. Each of its marks is a token.

    A turn is `start`, its role, a line break, its text and `end`. A line break separates turns. The
    tags of blocks, such as `<think>`, are the method's, and the same in every dialect.
    """

    start: str
    end: str
    pad: str
    vision_start: str
    """Stands before the placeholders of a frame."""
    vision_end: str
    image: str
    """Placeholder of one visual token of a picture or frame."""
    video: str
    """Placeholder of one visual token of a video."""
    calls: CallSyntax
    chat_template: str
    """Jinja template of a conversation, for exported models. It offers no tools."""
    special: tuple[str, ...]
    """Added tokens that are no text, in the order of their ids: the marks and others."""
    added: tuple[str, ...]
    """The other added tokens, in the order of their ids, which follow."""

    def open(self, role: str) -> str:
        """Return the beginning of a turn."""
        return f"{self.start}{role}\n"

    @property
    def visual(self) -> dict[str, str]:
        """The marks and placeholders of frames, by their fields of a `ModelConfig`."""
        marks = ("image", "video", "vision_start", "vision_end")
        return {f"{mark}_token_id": getattr(self, mark) for mark in marks}

    @property
    def to_assistant(self) -> str:
        """The end of a turn, and the beginning of the assistant's."""
        return f"{self.end}\n{self.open('assistant')}"


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """Return the printable character for each byte in byte-level vocabularies (GPT-2's map)."""
    # Printable bytes of Latin-1 represent themselves; the others, in order, take 256, 257, ...
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    moved = {byte: chr(256 + n) for n, byte in enumerate(others)}
    return tuple(moved.get(byte, chr(byte)) for byte in range(256))


class Vocabulary:
    """A byte-level tokenizer: ids, texts and the bytes of every token.

    >>> vocabulary = tokenizer_file.load("models/Qwen3-VL-8B-Instruct", dialect)
    >>> vocabulary.decode(vocabulary.encode("so</think>"))
    'so</think>'

    Attributes:
        longest: Upper bound on the bytes of a token.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, dialect: Dialect):
        self.tokenizer = tokenizer
        self.dialect = dialect
        self._ids = tokenizer.get_vocab(with_added_tokens=True)
        self._bytes = self._bytes_by_id()
        self.longest = max(map(len, self._bytes))
        self.pad = self[dialect.pad]
        self.eos = self[dialect.end]

    def _bytes_by_id(self) -> tuple[bytes, ...]:
        added = self.tokenizer.get_added_tokens_decoder()
        characters = {character: byte for byte, character in enumerate(byte_characters())}
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

    @property
    def visual_ids(self) -> dict[str, int]:
        """Ids of `Dialect.visual`."""
        return {field: self[mark] for field, mark in self.dialect.visual.items()}

    @functools.cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The texts that `encode` always turns into a single token, in the order of their ids."""
        added = self.tokenizer.get_added_tokens_decoder()
        return tuple(token.content for _, token in sorted(added.items()))

    def __getitem__(self, token: str) -> int:
        """Return the id of an added token, such as `<think>`."""
        if token not in self._ids:
            raise KeyError(f"tokenizer: no token {token!r}; use the tokenizer of a supported model")
        return self._ids[token]

    def encode(self, text: str) -> Int32[np.ndarray, " t"]:
        """Return the ids of a text. Added tokens in it are recognised; no start or end token is
        added."""
        # `encode` would stop all other threads, which is long if the text is.
        [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoding.ids, np.int32)

    def token_bytes(self, id: int | np.integer) -> bytes:
        """Return the UTF-8 bytes of one token, which may be part of a character; empty for unused
        ids."""
        # A model can sample ids above the vocabulary, because its embedding may have more rows.
        return self._bytes[id] if id < len(self._bytes) else b""

    def decode_turn(self, ids: Sequence[int | np.integer] | Int[np.ndarray, " t"]) -> str:
        """Return the text of a turn's ids, without the mark of its end."""
        return self.decode(ids).removesuffix(self.dialect.end)

    def decode(self, ids: Sequence[int | np.integer] | Int[np.ndarray, " t"]) -> str:
        """Return the text of ids, added tokens included. Invalid UTF-8 becomes U+FFFD."""
        table = self._bytes
        data = b"".join(table[id] for id in np.asarray(ids).tolist() if id < len(table))
        return data.decode("utf-8", errors="replace")
