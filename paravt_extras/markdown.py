"""Markdown tables that can be read in a terminal, too."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

Figures = Mapping[str, float | None]
"""Figures of a run, by the name of their line; None: not measured."""


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format a table whose columns have equal widths.

    The first column is aligned left, the others right. Missing cells at the end are empty.
    """
    width = len(headings)
    filled = [[*cells, *[""] * (width - len(cells))] for cells in [headings, *lines]]
    widths = [max(3, *(len(cells[column]) for cells in filled)) for column in range(width)]
    rule = ["-" * widths[0], *("-" * (size - 1) + ":" for size in widths[1:])]
    return "\n".join(_line(cells, widths) for cells in [filled[0], rule, *filled[1:]])


def over_runs(values: Sequence[float | None]) -> str:
    """Return the mean, with the lowest and the highest value if there are several; or a dash."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    mean = f"{statistics.mean(known):z.3g}"
    return mean if len(known) == 1 else f"{mean} [{min(known):z.3g}, {max(known):z.3g}]"


def table_of_figures(groups: Mapping[str, Sequence[Figures]]) -> str:
    """Return a table with a line per figure that was measured, and a column per group of runs.

    Args:
        groups: The figures of each run, by the name of its group.
    """
    names = dict.fromkeys(name for runs in groups.values() for run in runs for name in run)
    lines = []
    for name in names:
        columns = [[run.get(name) for run in runs] for runs in groups.values()]
        if any(value is not None for values in columns for value in values):
            lines.append([name, *map(over_runs, columns)])
    return table(["", *groups], lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.ljust(size) if column == 0 else cell.rjust(size)
        for column, (cell, size) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join([first, *others])} |"
