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

Pages = tuple[int, ...]  # the full pages that a sequence begins with


class Layout(NamedTuple):
    """Where the sequences of one call go."""

    rows: list[int | None]
    """The sequence of each row, None in an idle row."""
    shared: list[Pages]
    """The pages that each group reads together."""


class _Family(NamedTuple):
    """Sequences that begin alike, and their common pages."""

    shared: Pages
    members: list[int]


def choose_layout(paths: Sequence[Pages], groups: int, size: int) -> Layout:
    """Return the layout that shares the most pages.

    Args:
        paths: the full pages that each sequence begins with, for at most groups * size sequences.
        groups: number of groups.
        size: rows of a group.
    """
    families = _families(paths, size)
    # The largest savings come first. Sequences of the last families are guests where there is room.
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


def _families(paths: Sequence[Pages], most: int) -> list[_Family]:
    """Deal sequences to families of at most `most` members."""
    families: list[_Family] = []
    # In sorted order, sequences that begin alike are neighbours.
    for n in sorted(range(len(paths)), key=lambda n: paths[n]):
        if families:
            shared, members = families[-1]
            common = shared[: len(os.path.commonprefix([shared, paths[n]]))]
            # Do not join if the family would lose half of its pages or more.
            if len(members) < most and 2 * len(common) > len(shared):
                families[-1] = _Family(common, [*members, n])
                continue
        families.append(_Family(paths[n], [n]))
    return families
