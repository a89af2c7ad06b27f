"""struct(o): where the tags stand among the tokens that were generated.

Owns finding the structural tokens of a trajectory and laying them out as padded arrays; what credit they get is
`paravt_jax.method.grpo`. Refuses strings: it works on token ids and the bytes of each token, because `<answer>` is ordinary text
whose tokens depend on its neighbours (`<`, `answer`, `>B`). Invariant: every position is a MODEL token; a token that holds
any byte of a tag is marked with that tag's kind, and no other token is, but for violations; a block that is open where a response
ends has its violation on that response's last token.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int, Int8, Int32

from paravt_jax.method.parsing import TAG_PATTERN
from paravt_jax.method.records import Author


class Kind(enum.IntEnum):
    """What a structural token is. VIOLATION is where an open block was broken: the next block's first token, or the response's last."""

    THINK_OPEN = 0
    THINK_CLOSE = 1
    CALL_OPEN = 2
    CALL_CLOSE = 3
    ANSWER_OPEN = 4
    ANSWER_CLOSE = 5
    VIOLATION = 6


class Structure(NamedTuple):
    """The structural tokens of a batch, padded. A token appears once for each of its kinds: a call that breaks an open think is CALL_OPEN
    and VIOLATION, a `><` between two tags belongs to both."""

    positions: Int32[Array | np.ndarray, "b s"]
    kinds: Int8[Array | np.ndarray, "b s"]
    valid: Bool[Array | np.ndarray, "b s"]


_TAG = re.compile(TAG_PATTERN.encode())
_KINDS = {
    b"think": (Kind.THINK_OPEN, Kind.THINK_CLOSE),
    b"tool_call": (Kind.CALL_OPEN, Kind.CALL_CLOSE),
    b"answer": (Kind.ANSWER_OPEN, Kind.ANSWER_CLOSE),
}
# Over the bytes of int8 authors: what was pinned, if anything, and then what the model wrote.
_RESPONSE = re.compile(b"%c*(%c+)" % (Author.PINNED, Author.MODEL))


def _find_tags(text: bytes) -> Iterator[tuple[int, int, Kind]]:
    """What one response is made of, as (first byte, end byte, kind); a violation has the bytes of the tag that breaks the open block.

    A closing tag without its open block belongs to no structure. A block is broken by any other opening tag (`<tool_code>` and
    `<tool_response>` too), or by the end of the response: then the violation is (len, len + 1), the byte that never came.
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
            yield match.start(), match.end(), Kind.VIOLATION
        opened = name if name in _KINDS else None
        if opened is not None:
            yield match.start(), match.end(), _KINDS[name][0]
    if opened is not None:
        yield len(text), len(text) + 1, Kind.VIOLATION


def find_structure(
    vocabulary_bytes: Callable[[int], bytes],
    ids: Int[np.ndarray, " t"],
    authors: Int[np.ndarray, " t"],
) -> tuple[Int32[np.ndarray, " s"], Int8[np.ndarray, " s"]]:
    """Positions and kinds of one trajectory's structural tokens, in order, each pair once.

    `vocabulary_bytes` gives the bytes of a token id, special tokens as their text. A response is what was PINNED and the MODEL tokens
    after it: tags of the prompt and of tool responses are not the model's, and a tag that one response begins no other completes.
    What is pinned opens blocks like anything else, but only MODEL tokens are returned: no loss falls on what the model did not choose.
    So of a tag that begins in the pinned text the model's part is marked, and if that tag breaks a block, the violation is the
    model's first token in it. Part of a tag at a response's end (`<ans`) is text. A response without MODEL tokens has no structure.
    """
    ids = np.asarray(ids)
    marks = [np.zeros(0, np.int64)]  # position * len(Kind) + kind
    for response in _RESPONSE.finditer(np.asarray(authors, np.int8).tobytes()):
        first, end = response.span()
        pieces = [vocabulary_bytes(i) for i in ids[first:end].tolist()]
        pinned = sum(len(piece) for piece in pieces[: response.start(1) - first])
        # The token of every byte; the byte after the last one counts to the last token, though that may have none.
        owner = np.append(
            np.repeat(np.arange(first, end), [len(piece) for piece in pieces]), end - 1
        )
        low, high, kinds = np.array([*_find_tags(b"".join(pieces))], np.int64).reshape(-1, 3).T
        low = np.maximum(low, pinned)
        high = np.where(kinds == Kind.VIOLATION, np.minimum(high, low + 1), high)
        sizes = np.maximum(high - low, 0)
        in_tags = np.arange(sizes.sum()) + np.repeat(
            low + sizes - np.cumsum(sizes), sizes
        )  # low, low + 1, ..., high - 1 of each
        marks.append(owner[in_tags] * len(Kind) + np.repeat(kinds, sizes))
    positions, kinds = np.divmod(np.unique(np.concatenate(marks)), len(Kind))
    return positions.astype(np.int32), kinds.astype(np.int8)


def pad_structures(
    structures: Sequence[tuple[Int32[np.ndarray, " s"], Int8[np.ndarray, " s"]]], multiple: int = 64
) -> Structure:
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
