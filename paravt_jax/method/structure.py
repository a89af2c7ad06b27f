"""struct(o): finds the tags among the generated tokens, and pads their positions to arrays.

`paravt_jax.method.grpo` gives credit to these structural tokens. Tags are found by byte offsets,
not by token ids: `<answer>` is ordinary text, whose tokens depend on their neighbours, and so are
`<think>` and `<tool_call>` in some tokenizers. In others they are single tokens:

    text    s o < / t h i n k > < a n s w e r > B
    tokens  so  </think>        <  answer      >B
    kinds   -   THINK_CLOSE     ANSWER_OPEN on all three

All positions are MODEL tokens. A token with any byte of a tag is marked with the tag's kind.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int, Int8, Int32

from paravt_jax.method.parsing import TAG_PATTERN
from paravt_jax.method.records import Author


class Kind(enum.IntEnum):
    """The kind of a structural token.

    VIOLATION marks where an open block was broken: the first token of the tag that broke
    it, or the last token of a response that ends inside a block.
    """

    THINK_OPEN = 0
    THINK_CLOSE = 1
    CALL_OPEN = 2
    CALL_CLOSE = 3
    ANSWER_OPEN = 4
    ANSWER_CLOSE = 5
    VIOLATION = 6


class Structure(NamedTuple):
    """The structural tokens of a batch of b rows, padded to s per row.

    A token appears once for each of its kinds: a `<tool_call>` inside an open think is CALL_OPEN
    and VIOLATION, and a token `><` between two tags has the kinds of both.
    """

    positions: Int32[Array | np.ndarray, "b s"]
    """Index of the token in its row."""
    kinds: Int8[Array | np.ndarray, "b s"]
    """`Kind` of the token."""
    valid: Bool[Array | np.ndarray, "b s"]
    """False for padding."""


_TAG = re.compile(TAG_PATTERN.encode())
KIND_OF_TAG = {
    b"<think>": Kind.THINK_OPEN,
    b"</think>": Kind.THINK_CLOSE,
    b"<tool_call>": Kind.CALL_OPEN,
    b"</tool_call>": Kind.CALL_CLOSE,
    b"<answer>": Kind.ANSWER_OPEN,
    b"</answer>": Kind.ANSWER_CLOSE,
}
"""The structural tags, and the kinds of their tokens."""
TAGS = tuple(KIND_OF_TAG.values())
"""The kinds that are tags."""
# A response, searched in the int8 authors as bytes: pinned tokens, if any, then the model's.
_RESPONSE = re.compile(b"%c*(%c+)" % (Author.PINNED, Author.MODEL))


def _find_tags(text: bytes) -> Iterator[tuple[int, int, Kind]]:
    """Yield the tags and violations of one response as (first byte, end byte, kind).

    An open block is broken by any opening tag, including `<tool_code>` and `<tool_response>`, or by
    the end of the response. The violation is on the bytes of that tag, or on (len, len + 1), the
    byte after the end. A closing tag that does not close the open block is ignored.
    """
    open_block: bytes | None = None
    for match in _TAG.finditer(text):
        name = match.group(2)
        is_closing = bool(match.group(1))
        if is_closing:
            if name == open_block:
                yield match.start(), match.end(), KIND_OF_TAG[match[0]]
                open_block = None
            continue
        if open_block is not None:
            yield match.start(), match.end(), Kind.VIOLATION
        open_block = name if match[0] in KIND_OF_TAG else None
        if open_block is not None:
            yield match.start(), match.end(), KIND_OF_TAG[match[0]]
    if open_block is not None:
        yield len(text), len(text) + 1, Kind.VIOLATION


def find_structure(
    vocabulary_bytes: Callable[[int], bytes],
    ids: Int[np.ndarray, " t"],
    authors: Int[np.ndarray, " t"],
) -> tuple[Int32[np.ndarray, " s"], Int8[np.ndarray, " s"]]:
    """Find the structural tokens of one trajectory.

    A response consists of PINNED tokens and the MODEL tokens after them. Each response is searched
    separately, so tags in prompts and tool responses do not count, and no tag spans two responses.

    Pinned text opens blocks like any other text, but only MODEL tokens are returned, because the
    loss excludes tokens that the model did not choose. If a tag begins in the pinned text, only its
    MODEL tokens are marked, and a violation is on the first of them.

    Args:
        vocabulary_bytes: The bytes of a token id; for special tokens, of their text.
        ids: Token ids of the trajectory.
        authors: `Author` of each token.

    Returns:
        Positions and kinds, in order, each pair once.
    """
    ids = np.asarray(ids)
    # Each mark is position * len(Kind) + kind, so that sorting orders by position, then by kind.
    marks = [np.zeros(0, np.int64)]
    for response in _RESPONSE.finditer(np.asarray(authors, np.int8).tobytes()):
        first, end = response.span()
        pieces = [vocabulary_bytes(i) for i in ids[first:end].tolist()]
        lengths = [len(piece) for piece in pieces]
        pinned_bytes = sum(lengths[: response.start(1) - first])
        tags = [*_find_tags(b"".join(pieces))]
        low, high, kinds = np.array(tags, np.int64).reshape(-1, 3).T

        low = np.maximum(low, pinned_bytes)
        # Keep one byte of each violation, so that it marks a single token.
        high = np.where(kinds == Kind.VIOLATION, np.minimum(high, low + 1), high)
        sizes = np.maximum(high - low, 0)
        # The bytes of all tags: low[0], low[0] + 1, ..., high[0] - 1, low[1], ...
        starts = np.cumsum(sizes) - sizes
        tag_bytes = np.arange(sizes.sum()) + np.repeat(low - starts, sizes)

        # The token of each byte. The missing byte at the end counts to the last token.
        token_of_byte = np.append(np.repeat(np.arange(first, end), lengths), end - 1)
        marks.append(token_of_byte[tag_bytes] * len(Kind) + np.repeat(kinds, sizes))
    # A tag of several bytes in one token marks that token several times.
    positions, kinds = np.divmod(np.unique(np.concatenate(marks)), len(Kind))
    return positions.astype(np.int32), kinds.astype(np.int8)


def pad_structures(
    structures: Sequence[tuple[Int32[np.ndarray, " _"], Int8[np.ndarray, " _"]]],
    multiple: int = 64,
) -> Structure:
    """Stack the results of `find_structure` for several trajectories.

    Args:
        structures: Positions and kinds per trajectory.
        multiple: The padded length is a positive multiple of this, so that few shapes occur and few
            programs are compiled.
    """
    if multiple < 1:
        raise ValueError(f"multiple: {multiple}; give at least 1")
    longest = max((len(positions) for positions, _ in structures), default=0)
    length = max(1, math.ceil(longest / multiple)) * multiple
    shape = (len(structures), length)
    padded = Structure(
        positions=np.zeros(shape, np.int32),
        kinds=np.zeros(shape, np.int8),
        valid=np.zeros(shape, np.bool_),
    )
    for index, (positions, kinds) in enumerate(structures):
        n = len(positions)
        padded.positions[index, :n] = positions
        padded.kinds[index, :n] = kinds
        padded.valid[index, :n] = True
    return padded
