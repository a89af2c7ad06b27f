"""Samples into rows of one length: first fit, with every sample whole.

Owns which sample goes into which row. Refuses to cut: a sample longer than a row is in none and is named. Invariant: every other sample
is in exactly one row, no row is overfull, and lengths and order alone decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Packing:
    """`rows`: the samples of each row by number, in order. `left_out`: those longer than a row. Lengths are in tokens."""

    rows: tuple[tuple[int, ...], ...]
    left_out: tuple[int, ...]
    tokens: int
    length: int

    @property
    def padding(self) -> float:
        """Share of the rows' tokens that are padding; 0 where there are no rows."""
        return 1.0 - self.tokens / (len(self.rows) * self.length) if self.rows else 0.0


def pack(lengths: Sequence[int], length: int) -> Packing:
    """Each sample goes into the first row that has room for it, a new one where none has.

    `lengths` of the samples and `length` of a row, in tokens. ValueError for a sample or a row of less than one token.
    """
    if length < 1 or min(lengths, default=1) < 1:
        raise ValueError(
            f"packing: rows of {length} tokens, the shortest sample has {min(lengths, default=1)}; both need at least 1"
        )
    rows: list[list[int]] = []
    left_out: list[int] = []
    room = _Room(len(lengths), length)
    for sample, tokens in enumerate(lengths):
        if tokens > length:
            left_out.append(sample)
            continue
        row = room.take(tokens)
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
    kept = sum(lengths) - sum(lengths[sample] for sample in left_out)
    return Packing(tuple(map(tuple, rows)), tuple(left_out), kept, length)


class _Room:
    """What is left of each row, as a tree of maxima, so that the first row with room is found in logarithmic time."""

    def __init__(self, rows: int, length: int):
        self._leaves = 1 << max(rows - 1, 0).bit_length()
        self._most = [length] * (2 * self._leaves)

    def take(self, tokens: int) -> int:
        """The first row with that much room, which it then has less of."""
        node = 1
        while node < self._leaves:
            node *= 2
            node += self._most[node] < tokens
        row, self._most[node] = node - self._leaves, self._most[node] - tokens
        while node > 1:
            node //= 2
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])
        return row
