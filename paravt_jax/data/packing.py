"""Packs samples into rows of equal length. No sample is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Packing(NamedTuple):
    """Which samples share a row.

    Attributes:
        rows: The sample numbers of each row, in order.
        left_out: Numbers of the samples that are longer than a row.
    """

    rows: tuple[tuple[int, ...], ...]
    left_out: tuple[int, ...]


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
    # Free tokens of every row, those without a sample included.
    free = np.full(len(lengths), length)
    for sample, tokens in enumerate(lengths):
        if tokens > length:
            left_out.append(sample)
            continue
        row = int(np.argmax(free[: len(rows) + 1] >= tokens))
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
        free[row] -= tokens
    return Packing(tuple(map(tuple, rows)), tuple(left_out))
