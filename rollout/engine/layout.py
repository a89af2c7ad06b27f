"""Chooses the row of each sequence in a decoding call, and the pages that rows read together.

The rows of a call form groups of equal size. The rows of a group read their common pages once, then
each its own. With two rows per group, and pages by number:

    group 0   shared 3 8 1     row 0   own 4 7      sequence 5, on pages 3 8 1 4 7
                               row 1   own 2        sequence 2, on pages 3 8 1 2
    group 1   shared 6 5       row 2   own 9        sequence 0, on pages 6 5 9
                               row 3   own 2 4 1    sequence 1, a guest: it shares nothing

Layouts do not change samples, except by rounding.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

Serials = tuple[int, ...]  # `pages.Node.serial` of the full pages that a sequence begins with


class Layout(NamedTuple):
    """Where the sequences of one call go."""

    rows: list[int | None]
    """The sequence of each row, None in an idle row."""
    shared: list[Serials]
    """The pages that each group reads together."""


class _Family(NamedTuple):
    """Sequences that begin alike, and their common pages."""

    shared: Serials
    members: list[int]


def choose_layout(paths: Sequence[Serials], groups: int, size: int) -> Layout:
    """Return the layout in which groups read many pages together.

    Args:
        paths: the full pages that each sequence begins with, for at most groups * size sequences.
        groups: number of groups.
        size: rows of a group.
    """
    families = _families(paths, size)
    # The largest savings come first. Members of the last families are guests in idle rows.
    families.sort(key=lambda family: -len(family.shared) * (len(family.members) - 1))
    rows: list[int | None] = [None] * (groups * size)
    for group, family in enumerate(families[:groups]):
        rows[group * size : group * size + len(family.members)] = family.members
    idle = iter([row for row, n in enumerate(rows) if n is None])
    for family in families[groups:]:
        for n in family.members:
            rows[next(idle)] = n
    shared = [family.shared for family in families[:groups]]
    return Layout(rows, shared + [()] * (groups - len(shared)))


def _families(paths: Sequence[Serials], most: int) -> list[_Family]:
    """Deal sequences to families of at most `most` members, so that the fewest pages are read."""
    # In sorted order, sequences that begin alike are neighbours, and every family is a run of them.
    order = sorted(range(len(paths)), key=lambda n: paths[n])
    # For each number of sequences: the most pages that families of them save, and where the last
    # of these families begins.
    saved, begins = [0], [0]
    for end in range(1, len(order) + 1):
        choices = []
        for begin in range(max(0, end - most), end):
            common = _common(paths[order[begin]], paths[order[end - 1]])
            choices.append((saved[begin] + len(common) * (end - begin - 1), begin))
        # Of equal choices, the largest family.
        best, begin = max(choices, key=lambda choice: (choice[0], -choice[1]))
        saved.append(best)
        begins.append(begin)
    families: list[_Family] = []
    end = len(order)
    while end:
        members = order[begins[end] : end]
        families.append(_Family(_common(paths[members[0]], paths[members[-1]]), members))
        end = begins[end]
    return families


def _common(a: Serials, b: Serials) -> Serials:
    return a[: len(os.path.commonprefix([a, b]))]
