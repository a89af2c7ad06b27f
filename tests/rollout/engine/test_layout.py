"""Which row decodes which sequence.

Every layout reads each sequence whole, and in total no more than without shared prefixes.
"""

from __future__ import annotations

import collections
import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engine.layout import Layout, Serials, choose_layout
from rollout.engine.settings import EngineSizes

PAGE = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """The arguments of `choose_layout`."""

    paths: list[Serials]
    lengths: list[int]
    loaded: dict[int, list[Serials]]
    slots: int
    rows_per_prefix: int
    prefix_lengths: tuple[int, ...]
    row_lengths: tuple[int, ...]

    def layout(self) -> Layout:
        sizes = EngineSizes(
            row_lengths=self.row_lengths,
            prefill_lengths=(PAGE,),
            prefix_lengths=self.prefix_lengths,
            slots=self.slots,
            rows_per_prefix=self.rows_per_prefix,
            page=PAGE,
        )
        return choose_layout(self.paths, self.lengths, self.loaded, sizes)

    @property
    def blocks(self) -> int:
        return self.slots // self.rows_per_prefix


def path(*turns: int) -> Serials:
    """Serials of the pages on a walk down a tree. A serial depends on all turns before it."""
    serials: list[int] = []
    serial = 1
    for turn in turns:
        serial = 3 * serial + turn
        serials.append(serial)
    return tuple(serials)


@st.composite
def cases(draw) -> Case:
    rows_per_prefix = draw(st.sampled_from([1, 2, 3, 4]))
    blocks = draw(st.integers(1, 4))
    slots = rows_per_prefix * blocks
    # Common prefixes, each cut somewhere, and what every sequence has of its own after them.
    turns = st.integers(0, 2)
    common = draw(st.lists(st.lists(turns, max_size=9), min_size=1, max_size=3))
    walk = st.builds(
        lambda start, end, own: start[:end] + own,
        st.sampled_from(common),
        st.integers(0, 9),
        st.lists(turns, max_size=4),
    )
    paths = [path(*turns) for turns in draw(st.lists(walk, max_size=slots))]
    prefix_pages = sorted(draw(st.sets(st.integers(1, 12), max_size=3)))
    row_pages = sorted(draw(st.sets(st.integers(1, 16), max_size=3)) | {16})
    prefix_lengths = tuple(PAGE * pages for pages in prefix_pages)
    row_lengths = tuple(PAGE * pages for pages in row_pages)
    lengths = [draw(st.integers(len(pages) * PAGE, row_lengths[-1])) for pages in paths]
    prefixes = [pages[:end] for pages in paths for end in range(len(pages) + 1)] or [()]
    buffers = st.lists(st.sampled_from(prefixes), min_size=blocks, max_size=blocks)
    loaded = {length: draw(buffers) for length in prefix_lengths if draw(st.booleans())}
    return Case(paths, lengths, loaded, slots, rows_per_prefix, prefix_lengths, row_lengths)


def begins_with(pages: Serials, prefix: Serials) -> bool:
    return bool(prefix) and pages[: len(prefix)] == prefix


def check(case: Case, layout: Layout) -> None:
    """What must hold of any layout."""
    # Every sequence is in one row.
    assert len(layout.rows) == case.slots
    assert len(layout.prefixes) == case.blocks
    assert sorted(n for n in layout.rows if n is not None) == list(range(len(case.paths)))
    # The lengths are compiled ones.
    assert layout.prefix_length in (0, *case.prefix_lengths)
    assert layout.row_length in case.row_lengths
    assert bool(layout.prefix_length) == any(layout.prefixes)
    for block, prefix in enumerate(layout.prefixes):
        assert len(prefix) * PAGE <= layout.prefix_length
        # A prefix that no row of its block begins with would be read for nothing.
        first = block * case.rows_per_prefix
        rows = layout.rows[first : first + case.rows_per_prefix]
        members = [case.paths[n] for n in rows if n is not None]
        assert not prefix or any(begins_with(pages, prefix) for pages in members)
    # What a row does not read from its block's prefix, it reads itself.
    for row, n in enumerate(layout.rows):
        if n is not None:
            prefix = layout.prefixes[row // case.rows_per_prefix]
            shared = len(prefix) * PAGE if begins_with(case.paths[n], prefix) else 0
            assert layout.row_length >= case.lengths[n] - shared
    longest = max(case.lengths, default=0)
    unshared = case.slots * min(length for length in case.row_lengths if length >= longest)
    read = case.blocks * layout.prefix_length + case.slots * layout.row_length
    assert read <= unshared
    check_loaded_stay(layout, case.loaded)


def check_loaded_stay(layout: Layout, loaded: dict[int, list[Serials]]) -> None:
    """A prefix that is in a buffer already is used there, as often as it is in one."""
    before = loaded.get(layout.prefix_length, [()] * len(layout.prefixes))
    staying = collections.Counter(
        new for new, old in zip(layout.prefixes, before, strict=True) if new and new == old
    )
    available = collections.Counter(prefix for prefix in before if prefix)
    assert staying == collections.Counter(layout.prefixes) & available


@settings(max_examples=200)
@given(cases())
def test_any_sequences_are_read_whole_and_once(case):
    """With any prefixes in the buffers, and again with those of the first layout."""
    layout = case.layout()
    check(case, layout)
    loaded = case.loaded | {layout.prefix_length: list(layout.prefixes)}
    again = dataclasses.replace(case, loaded=loaded)
    check(again, again.layout())


# --- by example: eight blocks of eight rows, pages of four tokens ---


def choose(
    paths: list[Serials], lengths: list[int], loaded: dict[int, list[Serials]] | None = None
) -> Layout:
    """A checked layout of 64 rows."""
    case = Case(
        paths, lengths, loaded or {}, 64, 8, prefix_lengths=(80, 160), row_lengths=(40, 80, 200)
    )
    layout = case.layout()
    check(case, layout)
    return layout


def lengths_of(layout: Layout) -> tuple[int, int]:
    return layout.prefix_length, layout.row_length


def prompt(number: int, pages: int) -> Serials:
    return tuple(range(1000 * number, 1000 * number + pages))


def test_eight_samples_of_eight_long_prompts_read_each_prompt_once():
    prompts = [prompt(n, 40) for n in range(8)]
    order = [(17 * i) % 64 for i in range(64)]  # shuffled
    paths = [prompts[n % 8] for n in order]
    layout = choose(paths, [160 + n % 40 for n in order])
    assert lengths_of(layout) == (160, 40)
    assert set(layout.prefixes) == set(prompts)
    for row, n in enumerate(layout.rows):
        assert n is not None
        assert paths[n] == layout.prefixes[row // 8]


def test_a_group_that_fills_two_blocks_has_its_prefix_in_both():
    layout = choose([prompt(0, 40)] * 16, [170] * 16)
    assert lengths_of(layout) == (160, 40)
    assert sorted(layout.prefixes) == [()] * 6 + [prompt(0, 40)] * 2


def test_prefixes_stay_in_their_blocks_when_groups_come_and_go():
    prompts = [prompt(n, 40) for n in range(8)]
    before = choose([prompts[n // 8] for n in range(64)], [170] * 64)
    # Groups 2 and 5 have ended, two others have come.
    now = [prompt(n + 10, 40) if n in (2, 5) else prompts[n] for n in range(8)]
    paths = [now[n // 8] for n in range(64)][::-1]
    after = choose(paths, [170] * 64, {160: list(before.prefixes)})
    staying = [a == b for a, b in zip(before.prefixes, after.prefixes, strict=True)]
    assert sum(staying) == 6
    assert set(after.prefixes) == set(now)


def test_what_remains_of_a_group_stays_in_its_block():
    """One sample per prompt is left. The copies of prefixes are there, so rows stay short."""
    prompts = [prompt(n, 36) for n in range(8)]
    before = choose([prompts[n // 8] for n in range(64)], [150] * 64)
    left = [(*pages, 7, 8) for pages in prompts[:5]]
    after = choose(left, [170] * 5, {160: list(before.prefixes)})
    assert lengths_of(after) == (160, 40)
    used = [prefix for prefix in after.prefixes if prefix]
    assert used == [prefix for prefix in before.prefixes if prefix in prompts[:5]]
    assert lengths_of(choose(left, [170] * 5)) == (0, 200)
