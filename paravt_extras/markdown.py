"""Markdown tables that can be read in a terminal, too."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 120
"""Columns at which notes are wrapped."""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table whose columns have equal widths.

    The first column is aligned left, the others right. Missing cells at the end of a row are empty.
    """
    width = len(headings)
    filled = [[*row, *[""] * (width - len(row))] for row in [headings, *rows]]
    widths = [max(3, *(len(row[column]) for row in filled)) for column in range(width)]
    rule = ["-" * widths[0], *("-" * (size - 1) + ":" for size in widths[1:])]
    return "\n".join(_line(row, widths) for row in [filled[0], rule, *filled[1:]])


def wrapped(note: str) -> str:
    """A note below a table, such as "- text", in lines of at most `WIDTH` columns."""
    return textwrap.fill(note, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.ljust(size) if column == 0 else cell.rjust(size)
        for column, (cell, size) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join([first, *others])} |"
