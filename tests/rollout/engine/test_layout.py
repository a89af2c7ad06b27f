"""Which row decodes which sequence: whatever there is, all of it is read, by somebody, and no more than without sharing."""

from __future__ import annotations

import collections
import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engine.layout import Layout, Serials, choose_layout

PAGE = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """What `choose_layout` is asked, in its order."""

    paths: list[Serials]
    lengths: list[int]
    held: dict[int, list[Serials]]
    slots: int
    rows_per_prefix: int
    prefix_lengths: tuple[int, ...]
    row_lengths: tuple[int, ...]

    def layout(self, held: dict[int, list[Serials]] | None = None) -> Layout:
        sizes = {
            "slots": self.slots,
            "rows_per_prefix": self.rows_per_prefix,
            "page": PAGE,
            "prefix_lengths": self.prefix_lengths,
            "row_lengths": self.row_lengths,
        }
        return choose_layout(self.paths, self.lengths, self.held if held is None else held, **sizes)

    @property
    def lines(self) -> int:
        return self.slots // self.rows_per_prefix


def path(*turns: int) -> Serials:
    """Serials of the pages of a walk down a tree: a page's number tells all that is before it."""
    serials, at = [], 1
    for turn in turns:
        serials.append(at := 3 * at + turn)
    return tuple(serials)


@st.composite
def cases(draw) -> Case:
    rows_per_prefix, lines = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 4))
    # Starts that many have, and what each has of its own after them.
    starts = draw(st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=3))
    tails = st.tuples(
        st.sampled_from(starts), st.integers(0, 9), st.lists(st.integers(0, 2), max_size=4)
    )
    walks = [
        start[:end] + tail
        for start, end, tail in draw(st.lists(tails, max_size=rows_per_prefix * lines))
    ]
    shared = tuple(PAGE * pages for pages in sorted(draw(st.sets(st.integers(1, 12), max_size=3))))
    own = tuple(
        PAGE * pages for pages in sorted(draw(st.sets(st.integers(1, 16), max_size=3)) | {16})
    )
    lengths = [draw(st.integers(len(walk) * PAGE, own[-1])) for walk in walks]
    paths = [path(*walk) for walk in walks]
    beginnings = [found[:end] for found in paths for end in range(len(found) + 1)] or [()]
    held = {
        length: draw(st.lists(st.sampled_from(beginnings), min_size=lines, max_size=lines))
        for length in shared
        if draw(st.booleans())
    }
    return Case(paths, lengths, held, rows_per_prefix * lines, rows_per_prefix, shared, own)


def starts_with(path: Serials, start: Serials) -> bool:
    return bool(start) and path[: len(start)] == start


def check(case: Case, layout: Layout) -> None:
    """All that must hold of any layout."""
    # Every sequence in one row.
    assert len(layout.rows) == case.slots and len(layout.prefixes) == case.lines
    assert sorted(n for n in layout.rows if n is not None) == list(range(len(case.paths)))
    # Shapes are those that were compiled.
    assert (
        layout.prefix_length in (0, *case.prefix_lengths) and layout.row_length in case.row_lengths
    )
    assert bool(layout.prefix_length) == any(layout.prefixes)
    for line, start in enumerate(layout.prefixes):
        assert len(start) * PAGE <= layout.prefix_length
        # A line's start is that of some of its rows, or nothing is won by it.
        members = [
            n
            for n in layout.rows[line * case.rows_per_prefix : (line + 1) * case.rows_per_prefix]
            if n is not None
        ]
        assert not start or any(starts_with(case.paths[n], start) for n in members)
    # What is not in the row's line is among what the row reads by itself.
    for row, n in enumerate(layout.rows):
        if n is not None:
            start = layout.prefixes[row // case.rows_per_prefix]
            assert layout.row_length >= case.lengths[n] - (
                len(start) * PAGE if starts_with(case.paths[n], start) else 0
            )
    flat = case.slots * min(
        size for size in case.row_lengths if size >= max(case.lengths, default=0)
    )
    assert case.lines * layout.prefix_length + case.slots * layout.row_length <= flat


def kept(layout: Layout, held: dict[int, list[Serials]]) -> None:
    """Starts that a line holds already are read into no other, as often as they are held."""
    before = held.get(layout.prefix_length, [()] * len(layout.prefixes))
    staying = collections.Counter(
        new for new, old in zip(layout.prefixes, before, strict=True) if new and new == old
    )
    assert staying == (
        collections.Counter(layout.prefixes) & collections.Counter(start for start in before if start)
    )


@settings(max_examples=200)
@given(cases())
def test_any_sequences_are_read_whole_and_once(case):
    """Whatever lines hold; and asked again, with lines as they are then."""
    layout = case.layout()
    check(case, layout)
    kept(layout, case.held)
    then = case.held | {layout.prefix_length: list(layout.prefixes)}
    again = case.layout(then)
    check(case, again)
    kept(again, then)


# --- by example: eight lines of eight rows, pages of four tokens ---


def big(
    paths: list[Serials], lengths: list[int], held: dict[int, list[Serials]] | None = None
) -> tuple[Case, Layout]:
    case = Case(
        paths, lengths, held or {}, 64, 8, prefix_lengths=(80, 160), row_lengths=(40, 80, 200)
    )
    layout = case.layout()
    check(case, layout)
    kept(layout, case.held)
    return case, layout


def prompt(number: int, pages: int) -> Serials:
    return tuple(range(1000 * number, 1000 * number + pages))


def test_eight_samples_of_eight_long_prompts_read_each_prompt_once():
    starts = [prompt(n, 40) for n in range(8)]
    order = [(17 * i) % 64 for i in range(64)]  # in no order
    case, layout = big([starts[n % 8] for n in order], [160 + n % 40 for n in order])
    assert (layout.prefix_length, layout.row_length) == (160, 40) and set(layout.prefixes) == set(
        starts
    )
    for row, n in enumerate(layout.rows):
        assert n is not None and case.paths[n] == layout.prefixes[row // 8]


def test_what_samples_wrote_before_is_theirs_and_the_prompt_is_the_lines():
    """A second turn: full pages go on from the prompt, different ones in each sample."""
    paths = [(*prompt(n // 8, 40), 100 * n + 7, 100 * n + 8) for n in range(64)]
    _, layout = big(paths, [176] * 64)
    assert (layout.prefix_length, layout.row_length) == (160, 40) and sorted(layout.prefixes) == [
        prompt(n, 40) for n in range(8)
    ]


def test_single_samples_share_nothing():
    _, layout = big([prompt(n, 30) for n in range(64)], [130] * 64)
    assert (layout.prefix_length, layout.row_length) == (0, 200) and not any(layout.prefixes)


def test_a_short_common_start_is_not_worth_a_line():
    """A system prompt that all have: copies of it would cost lines and make no row narrower."""
    _, layout = big([(*prompt(0, 2), *prompt(n + 1, 28)) for n in range(64)], [130] * 64)
    assert (layout.prefix_length, layout.row_length) == (0, 200)


def test_groups_and_their_sub_agents():
    """Four groups of eight, and 32 sub-agents with frames of their own: they take the rows that no group needs."""
    mains, subs = [prompt(n // 8, 40) for n in range(32)], [prompt(100 + n, 8) for n in range(32)]
    case, layout = big([*mains, *subs], [190] * 32 + [38] * 32)
    assert (layout.prefix_length, layout.row_length) == (160, 40)
    assert sorted(start for start in layout.prefixes if start) == [prompt(n, 40) for n in range(4)]
    for row, n in enumerate(layout.rows):
        assert n is not None and (n < 32) == bool(layout.prefixes[row // 8])


def test_one_that_fits_no_line_and_no_narrow_row_makes_all_rows_wide():
    """Then lines are read for nothing: everything flat costs less."""
    _, layout = big([*(prompt(n // 7, 40) for n in range(56)), prompt(100, 30)], [190] * 56 + [130])
    assert (layout.prefix_length, layout.row_length) == (0, 200)


def test_a_group_larger_than_a_line_takes_several():
    _, layout = big([prompt(0, 40)] * 20, [170] * 20)
    assert sum(start == prompt(0, 40) for start in layout.prefixes) == 3 and (
        layout.prefix_length,
        layout.row_length,
    ) == (160, 40)


def test_starts_stay_in_their_lines_when_groups_come_and_go():
    starts = [prompt(n, 40) for n in range(8)]
    _, first = big([starts[n // 8] for n in range(64)], [170] * 64)
    # Groups 2 and 5 are done, two others have come.
    now = [prompt(n + 10, 40) if n in (2, 5) else starts[n] for n in range(8)]
    _, then = big([now[n // 8] for n in range(64)][::-1], [170] * 64, {160: list(first.prefixes)})
    assert sum(a == b for a, b in zip(first.prefixes, then.prefixes, strict=True)) == 6 and set(
        then.prefixes
    ) == set(now)


def test_what_remains_of_a_group_stays_in_its_line():
    """One sample of each prompt is left, with pages of its own after it: the lines are there, rows stay narrow."""
    starts = [prompt(n, 36) for n in range(8)]
    _, first = big([starts[n // 8] for n in range(64)], [150] * 64)
    left = [(*start, 7, 8) for start in starts[:5]]
    _, then = big(left, [170] * 5, {160: list(first.prefixes)})
    assert (then.prefix_length, then.row_length) == (160, 40)
    assert [start for start in then.prefixes if start] == [
        start for start in first.prefixes if start in starts[:5]
    ]
    _, fresh = big(left, [170] * 5)
    assert (fresh.prefix_length, fresh.row_length) == (0, 200)


def test_nobody_at_all():
    _, layout = big([], [])
    assert layout == Layout((None,) * 64, ((),) * 8, 0, 40)
