"""Which row decodes which sequence, and which starts are read once for several rows.

Owns a choice between two evils: rows that read everything by themselves read a common start again and again; lines of rows that share one
copy of it make every row as wide as the longest rest. What is counted is what a step reads. Lines that hold a start already
keep it, since reading a line from its pages costs as much as some steps. Invariant: the choice changes no sample, up to rounding.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

Serials = tuple[int, ...]  # of the full pages that a sequence starts with


class Layout(NamedTuple):
    """`rows`: which sequence each row decodes, None for nobody. `starts`: the pages of each line's start, none where nothing is shared.

    `prefix_length` and `row_length`: tokens of a line and of a row; the former is 0 where no line
    has a start.
    """

    rows: tuple[int | None, ...]
    starts: tuple[Serials, ...]
    prefix_length: int
    row_length: int


def choose_layout(
    paths: Sequence[Serials],
    lengths: Sequence[int],
    held: dict[int, list[Serials]],
    *,
    slots: int,
    rows_per_prefix: int,
    page: int,
    prefix_lengths: Sequence[int],
    row_lengths: Sequence[int],
) -> Layout:
    """The layout that reads least for sequences of `lengths` tokens that start with the pages in `paths`, at most `slots` of them.

    `held`: for each length of lines, the starts that they hold now.
    """
    lines = slots // rows_per_prefix
    choices = []
    for length in (0, *prefix_lengths):
        groups = (
            _groups(
                [path[: length // page] for path in paths], rows_per_prefix, held.get(length, [])
            )[:lines]
            if length
            else []
        )
        saved = {n: len(start) * page for start, members in groups for n in members}
        need = max((tokens - saved.get(n, 0) for n, tokens in enumerate(lengths)), default=0)
        width = next(size for size in row_lengths if size >= need)
        choices.append((lines * length + slots * width, length, width, groups))
    _, length, width, groups = min(choices, key=lambda choice: choice[:2])
    return _place(
        groups,
        len(paths),
        held.get(length, []),
        Layout((None,) * slots, ((),) * lines, length, width),
        rows_per_prefix,
    )


def _groups(
    paths: Sequence[Serials], rows_per_prefix: int, held: Sequence[Serials]
) -> list[tuple[Serials, list[int]]]:
    """Up to `rows_per_prefix` sequences that share a start, and that start; those that save most first.

    One that shares with nobody counts where a line holds its start already: it is what remains of a group.
    """
    groups: list[tuple[Serials, list[int]]] = []
    for n in sorted(range(len(paths)), key=lambda n: paths[n]):
        if groups:
            start, members = groups[-1]
            common = start[: len(os.path.commonprefix([start, paths[n]]))]
            # A start that would lose more than half is better off alone.
            if common and 2 * len(common) > len(start) and len(members) < rows_per_prefix:
                groups[-1] = common, [*members, n]
                continue
        groups.append((paths[n], [n]))
    known = [(_known(start, held), members) for start, members in groups]
    kept = [
        (start, members)
        for start, members in known
        if start and (len(members) > 1 or start in held)
    ]
    return sorted(kept, key=lambda group: -len(group[0]) * len(group[1]))


def _known(start: Serials, held: Sequence[Serials]) -> Serials:
    """What a line holds of a start, where that is most of it: worth more than all of it, which would have to be read from its pages."""
    there = [
        line for line in held if line and 2 * len(line) > len(start) and start[: len(line)] == line
    ]
    return max(there, key=len, default=start)


def _place(
    groups: list[tuple[Serials, list[int]]],
    count: int,
    held: Sequence[Serials],
    empty: Layout,
    rows_per_prefix: int,
) -> Layout:
    """Groups into lines, into the one that holds their start where there is one; the rest where there is room."""
    rows, starts = list(empty.rows), list(empty.starts)
    free = list(range(len(starts)))
    homeless = []
    for start, members in groups:
        line = next((line for line in free if line < len(held) and held[line] == start), None)
        if line is None:
            homeless.append((start, members))
        else:
            free.remove(line)
            starts[line], rows[line * rows_per_prefix : line * rows_per_prefix + len(members)] = (
                start,
                members,
            )
    for start, members in homeless:
        line = free.pop()
        starts[line], rows[line * rows_per_prefix : line * rows_per_prefix + len(members)] = (
            start,
            members,
        )
    placed = {n for n in rows if n is not None}
    vacant = iter([row for row, n in enumerate(rows) if n is None])
    for n in range(count):
        if n not in placed:
            rows[next(vacant)] = n
    return empty._replace(rows=tuple(rows), starts=tuple(starts))
