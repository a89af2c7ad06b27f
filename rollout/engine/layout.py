"""Chooses the row of each sequence in a decoding program, and the rows that share a prefix.

The rows of a program form blocks of `rows_per_prefix`. A block has room for one prefix, stored
once, which all its rows read. With two rows per block:

    block 0   prefix A A A A     row 0   own tokens of sequence 5
                                 row 1   own tokens of sequence 2
    block 1   prefix B B B .     row 2   own tokens of sequence 0
                                 row 3   (idle)

All prefixes are padded to one length, and all rows to another. There are two costs to weigh.
Without shared prefixes, every row must be as long as the longest whole sequence. With shared
prefixes the rows are shorter, but the prefixes are read too, and only sequences in a block with
their own prefix profit. `choose_layout` takes the layout that reads the fewest tokens per step.

If a prefix is already in a block's buffer, it stays there if possible: gathering it from its pages
costs as much as several decoding steps. Layouts do not change samples, except by rounding.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from rollout.engine.settings import EngineSizes

Serials = tuple[int, ...]  # `pages.Node.serial` of the full pages a sequence begins with


class Layout(NamedTuple):
    """Where the sequences of one call go.

    Attributes:
        rows: the sequence of each row, None in an idle row.
        prefixes: the pages of each block's prefix, () if the block shares nothing.
        prefix_length: tokens that the prefixes are padded to, 0 if no block has one.
        row_length: tokens that every row's own pages are padded to.
    """

    rows: tuple[int | None, ...]
    prefixes: tuple[Serials, ...]
    prefix_length: int
    row_length: int


class _Group(NamedTuple):
    """Sequences that share a prefix, and that prefix."""

    prefix: Serials
    members: list[int]


def choose_layout(
    paths: Sequence[Serials],
    lengths: Sequence[int],
    loaded: dict[int, list[Serials]],
    sizes: EngineSizes,
    rows: int | None = None,
) -> Layout:
    """Return the layout that reads the fewest tokens per step.

    Args:
        paths: the full pages that each sequence begins with, for at most `slots` sequences.
        lengths: tokens of each sequence.
        loaded: for each prefix length, the prefixes in the buffers of the blocks.
        sizes: sizes of the programs.
        rows: rows of a program without shared prefixes; None: all slots, which may share some.
    """
    page = sizes.page
    prefix_lengths = () if rows else sizes.prefix_lengths
    rows = rows or sizes.slots
    blocks = rows // sizes.rows_per_prefix
    choices: list[tuple[int, int, int, list[_Group]]] = []
    for prefix_length in (0, *prefix_lengths):
        groups: list[_Group] = []
        if prefix_length:
            cut = [path[: prefix_length // page] for path in paths]
            groups = _groups(cut, sizes.rows_per_prefix, loaded.get(prefix_length, []))[:blocks]
        shared = {n: len(group.prefix) * page for group in groups for n in group.members}
        longest = max((tokens - shared.get(n, 0) for n, tokens in enumerate(lengths)), default=0)
        row_length = next(length for length in sizes.row_lengths if length >= longest)
        # Tokens read per step, padding included.
        cost = blocks * prefix_length + rows * row_length
        choices.append((cost, prefix_length, row_length, groups))
    # With equal costs, the shorter prefix wins.
    _, prefix_length, row_length, groups = min(choices, key=lambda choice: choice[:2])
    free = Layout((None,) * rows, ((),) * blocks, prefix_length, row_length)
    return _place(groups, len(paths), loaded.get(prefix_length, []), free, sizes.rows_per_prefix)


def _groups(
    paths: Sequence[Serials], rows_per_prefix: int, loaded: Sequence[Serials]
) -> list[_Group]:
    """Group up to `rows_per_prefix` sequences by common prefix. The largest savings come first.

    A single sequence is a group only if its prefix is already in a buffer: then it is the rest of a
    larger group.
    """
    groups: list[_Group] = []
    # In sorted order, sequences that begin alike are neighbours.
    for n in sorted(range(len(paths)), key=lambda n: paths[n]):
        if groups:
            prefix, members = groups[-1]
            common = prefix[: len(os.path.commonprefix([prefix, paths[n]]))]
            # Do not join if the group's prefix would lose half of its pages or more.
            worthwhile = bool(common) and 2 * len(common) > len(prefix)
            if worthwhile and len(members) < rows_per_prefix:
                groups[-1] = _Group(common, [*members, n])
                continue
        groups.append(_Group(paths[n], [n]))
    useful: list[_Group] = []
    for group in groups:
        prefix = _prefer_loaded(group.prefix, loaded)
        if prefix and (len(group.members) > 1 or prefix in loaded):
            useful.append(_Group(prefix, group.members))
    return sorted(useful, key=lambda group: -len(group.prefix) * len(group.members))


def _prefer_loaded(prefix: Serials, loaded: Sequence[Serials]) -> Serials:
    """Return the longest part of a prefix that is already in a buffer, if it is more than half of
    it.

    Otherwise the whole prefix, which then has to be gathered from its pages.
    """
    usable = [
        short
        for short in loaded
        if short and 2 * len(short) > len(prefix) and prefix[: len(short)] == short
    ]
    return max(usable, key=len, default=prefix)


def _place(
    groups: Sequence[_Group],
    count: int,
    loaded: Sequence[Serials],
    free: Layout,
    rows_per_prefix: int,
) -> Layout:
    """Place groups into the blocks of a free layout, then all other sequences into its other rows.

    A group goes to the block whose buffer holds its prefix, if there is one.
    """
    rows, prefixes = list(free.rows), list(free.prefixes)
    free_blocks = list(range(len(prefixes)))

    def put(group: _Group, block: int) -> None:
        first = block * rows_per_prefix
        prefixes[block] = group.prefix
        rows[first : first + len(group.members)] = group.members

    unplaced: list[_Group] = []
    for group in groups:
        holders = [
            block for block in free_blocks if block < len(loaded) and loaded[block] == group.prefix
        ]
        if holders:
            free_blocks.remove(holders[0])
            put(group, holders[0])
        else:
            unplaced.append(group)
    # New prefixes come last, so that none takes a block whose prefix another group needs.
    for group in unplaced:
        put(group, free_blocks.pop())

    placed = {n for n in rows if n is not None}
    idle_rows = iter([row for row, n in enumerate(rows) if n is None])
    for n in range(count):
        if n not in placed:
            rows[next(idle_rows)] = n
    return free._replace(rows=tuple(rows), prefixes=tuple(prefixes))
