"""struct(o): where the tags stand among the tokens that were generated.

Owns finding the structural tokens of a trajectory and laying them out as padded arrays; what credit they get is
`paravt_jax.grpo`. Refuses strings: it works on token ids and the bytes of each token, because `<answer>` is ordinary text
whose tokens depend on its neighbours (`<`, `answer`, `>B`). Invariant: every position is a MODEL token; a token that holds
any byte of a tag is marked with that tag's kind, and no other token is, but for violations.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int, Int8, Int32

from paravt_jax.parsing import TAG_PATTERN
from paravt_jax.records import Author


class Kind(enum.IntEnum):
    """What a structural token is. VIOLATION is the token at which an open block was broken."""

    THINK_OPEN = 0
    THINK_CLOSE = 1
    CALL_OPEN = 2
    CALL_CLOSE = 3
    ANSWER_OPEN = 4
    ANSWER_CLOSE = 5
    VIOLATION = 6


class Structure(NamedTuple):
    """The structural tokens of a batch, padded. A token may appear twice: a call that breaks an open think is CALL_OPEN and VIOLATION."""

    positions: Int32[Array | np.ndarray, "b s"]
    kinds: Int8[Array | np.ndarray, "b s"]
    valid: Bool[Array | np.ndarray, "b s"]


_TAG = re.compile(TAG_PATTERN.encode())
_KINDS = {
    b"think": (Kind.THINK_OPEN, Kind.THINK_CLOSE),
    b"tool_call": (Kind.CALL_OPEN, Kind.CALL_CLOSE),
    b"answer": (Kind.ANSWER_OPEN, Kind.ANSWER_CLOSE),
}


def _find_tags(text: bytes) -> Iterator[tuple[int, int, Kind]]:
    """The tags of one response as (first byte, end byte, kind), and violations as the bytes that break the open block.

    A closing tag without its open block belongs to no structure. A block is broken by any other opening tag (`<tool_code>` and
    `<tool_response>` too), or by the end of the response: then the violation's bytes are (len - 1, len).
    """
    opened: bytes | None = None
    for match in _TAG.finditer(text):
        name, closing = match.group(2), bool(match.group(1))
        if closing:
            if name == opened:
                yield match.start(), match.end(), _KINDS[name][1]
                opened = None
            continue
        if opened is not None:
            yield match.start(), match.start() + 1, Kind.VIOLATION
        opened = name if name in _KINDS else None
        if opened is not None:
            yield match.start(), match.end(), _KINDS[name][0]
    if opened is not None:
        yield len(text) - 1, len(text), Kind.VIOLATION


def find_structure(
    vocabulary_bytes: Callable[[int], bytes], ids: Int[np.ndarray, " t"], authors: Int[np.ndarray, " t"]
) -> tuple[Int32[np.ndarray, " s"], Int8[np.ndarray, " s"]]:
    """Positions and kinds of one trajectory's structural tokens, in order.

    `vocabulary_bytes` gives the bytes of a token id, special tokens as their text. A response is a run of PINNED and MODEL
    tokens: tags of the prompt and of tool responses are not the model's. A pinned `<think>` opens its block like any other, but
    only MODEL tokens are returned: no loss falls on what the model did not choose.
    """
    ids, authors = np.asarray(ids), np.asarray(authors)
    written = np.concatenate(([False], (authors == Author.PINNED) | (authors == Author.MODEL), [False]))
    edges = np.flatnonzero(written[1:] != written[:-1])
    found: list[tuple[int, int]] = []
    for first, end in edges.reshape(-1, 2):
        pieces = [vocabulary_bytes(int(i)) for i in ids[first:end]]
        ends = np.cumsum([len(piece) for piece in pieces])
        starts = np.concatenate(([0], ends[:-1]))
        for a, b, kind in _find_tags(b"".join(pieces)):
            low, high = np.searchsorted(ends, a, side="right"), np.searchsorted(starts, b, side="left")
            # An empty token inside a tag holds none of its bytes.
            found += [(int(first + t), int(kind)) for t in range(low, high) if pieces[t] and authors[first + t] == Author.MODEL]
    found.sort()
    return np.array([p for p, _ in found], np.int32), np.array([k for _, k in found], np.int8)


def pad_structures(structures: Sequence[tuple[Int32[np.ndarray, " s"], Int8[np.ndarray, " s"]]], multiple: int = 64) -> Structure:
    """Stacks what `find_structure` gave into arrays [b, s], s the next multiple (at least one) of `multiple`, so that few shapes occur."""
    if multiple < 1:
        raise ValueError(f"multiple: {multiple} is no size; give at least 1")
    longest = max((len(positions) for positions, _ in structures), default=0)
    shape = (len(structures), max(1, -(-longest // multiple)) * multiple)
    out = Structure(np.zeros(shape, np.int32), np.zeros(shape, np.int8), np.zeros(shape, np.bool_))
    for row, (positions, kinds) in enumerate(structures):
        n = len(positions)
        out.positions[row, :n], out.kinds[row, :n], out.valid[row, :n] = positions, kinds, True
    return out
