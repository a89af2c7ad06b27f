"""Which row decodes which sequence, and which pages rows read together."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engine.layout import Layout, Serials, choose_layout


def path(*turns: int) -> Serials:
    """Pages on a walk down a tree. A page's number depends on all turns before it."""
    pages: list[int] = []
    page = 1
    for turn in turns:
        page = 3 * page + turn
        pages.append(page)
    return tuple(pages)


def pages_read(layout: Layout, paths: list[Serials], size: int) -> int:
    """Pages that a step reads: those of each group once, then what follows in its rows."""
    total = sum(map(len, layout.shared))
    for row, n in enumerate(layout.rows):
        if n is not None:
            shared = layout.shared[row // size]
            total += len(paths[n]) - (len(shared) if paths[n][: len(shared)] == shared else 0)
    return total


@settings(max_examples=500)
@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_every_sequence_has_a_row_and_sharing_never_costs(data, groups, size):
    walks = st.lists(st.integers(0, 2), max_size=5).map(lambda turns: path(*turns))
    paths = data.draw(st.lists(walks, max_size=groups * size))
    layout = choose_layout(paths, groups, size)
    assert len(layout.rows) == groups * size
    placed = [n for n in layout.rows if n is not None]
    assert sorted(placed) == list(range(len(paths)))
    assert pages_read(layout, paths, size) <= sum(map(len, paths))
    for group, shared in enumerate(layout.shared):
        members = [n for n in layout.rows[group * size : (group + 1) * size] if n is not None]
        assert not shared or any(paths[n][: len(shared)] == shared for n in members)


def test_groups_of_rollouts_read_their_prompt_once_and_others_are_guests():
    """Two prompts of two rollouts each, and four sub-agents; one begins like a prompt."""
    first, second = path(0, 1, 2, 0), path(1, 1, 2, 1)
    alone = [path(2, n) for n in range(2)] + [first[:1] + (999,), ()]
    paths = [alone[0], first, alone[1], second, alone[2], first, second, alone[3]]
    layout = choose_layout(paths, 2, 4)
    assert sorted(layout.shared) == sorted([first, second])
    for row, n in enumerate(layout.rows):
        if n is not None and paths[n] in (first, second):
            assert layout.shared[row // 4] == paths[n]
    assert pages_read(layout, paths, 4) == sum(map(len, paths)) - 8
