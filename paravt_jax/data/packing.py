"""Packs samples into rows of equal length. No sample is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Packing:
    """Which samples share a row.

    Attributes:
        rows: The sample numbers of each row, in order.
        left_out: Numbers of the samples that are longer than a row.
        tokens: Total number of tokens in all rows, without padding.
        length: Tokens per row.
    """

    rows: tuple[tuple[int, ...], ...]
    left_out: tuple[int, ...]
    tokens: int
    length: int

    @property
    def padding(self) -> float:
        """Fraction of padding among the tokens of all rows; 0 if there are none."""
        if not self.rows:
            return 0.0
        return 1.0 - self.tokens / (len(self.rows) * self.length)


def pack(lengths: Sequence[int], length: int) -> Packing:
    """Pack samples first-fit: each goes into the first row with enough room, or into a new row.

    The result depends only on the lengths and their order.

    Args:
        lengths: Tokens of each sample.
        length: Tokens per row. Longer samples are left out and listed.

    Raises:
        ValueError: A sample or a row has less than one token.

    Example:
        >>> pack([3, 4, 2, 9], length=5).rows
        ((0, 2), (1,))
    """
    shortest = min(lengths, default=1)
    if length < 1 or shortest < 1:
        raise ValueError(
            f"packing: rows of {length} tokens, the shortest sample has {shortest}; "
            "both need at least 1"
        )
    rows: list[list[int]] = []
    left_out: list[int] = []
    packed_tokens = 0
    free = _FreeTokens(len(lengths), length)
    for sample, tokens in enumerate(lengths):
        if tokens > length:
            left_out.append(sample)
            continue
        row = free.take(tokens)
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
        packed_tokens += tokens
    return Packing(tuple(map(tuple, rows)), tuple(left_out), packed_tokens, length)


class _FreeTokens:
    """Free tokens of every row, as a binary tree of maxima.

    The tree finds the first row with enough room in O(log rows). It is stored as a heap:

                1             node 1: the largest free space of all rows
              /   \\
             2     3          node n has the children 2n and 2n + 1
            / \\   / \\
           4   5 6   7        leaves: one per row, in order
    """

    def __init__(self, rows: int, length: int):
        # The next power of two, so that the leaves form one complete level.
        self._leaves = 1 << max(rows - 1, 0).bit_length()
        self._most = [length] * (2 * self._leaves)

    def take(self, tokens: int) -> int:
        """Return the first row with room for `tokens`, and mark them as used."""
        node = 1
        while node < self._leaves:
            # Take the left child, or the right one if no row on the left has enough room.
            node *= 2
            node += self._most[node] < tokens
        row = node - self._leaves
        self._most[node] -= tokens
        # Recompute the maxima of the ancestors: this row may have been their largest.
        while node > 1:
            node //= 2
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])
        return row
