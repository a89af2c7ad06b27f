"""Packing: trajectories are in exactly one row that has room for them, and little is padding."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paravt_jax.method.protocol import Lengths
from train.learn.packing import (
    ALIGNMENT,
    MOST_SIZES,
    SHRINKING,
    GroupLengths,
    MicrobatchShape,
    StepShape,
    chunk_tokens,
    first_fit,
    microbatch_shapes,
    pack,
)
from train.learn.speed import real_tokens

LONGEST = 700

# (most, longest, total, devices, pieces)
SIZES = (
    (16_384, 1000, 10**6, 1, 1),
    (16_384, 1000, 10**6, 8, 1),
    (16_384, 1000, 10**6, 8, 4),
    (16_384, 1000, 10**6, 16, 16),
    (1, 1000, 10**6, 8, 2),
    (10**6, 1000, 10**6, 4, 1),
    (16_384, 1000, 5000, 2, 1),
    (3000, 130, 2900, 1, 1),
)


@st.composite
def groups_of(draw) -> GroupLengths:
    """Trajectories of at most LONGEST tokens."""
    prompt = draw(st.integers(0, LONGEST - 1))
    suffixes = draw(st.lists(st.integers(1, LONGEST - prompt), min_size=1, max_size=5))
    return GroupLengths(prompt, tuple(suffixes))


# Upper bound on tokens, devices, pieces.
BOUNDS = st.sampled_from(
    [(1, 4, 1), (2000, 1, 1), (2000, 4, 2), (20_000, 1, 1), (20_000, 4, 1), (20_000, 8, 8)]
)
GROUPS = st.lists(groups_of(), min_size=1, max_size=8)


def sizes_of(groups: Sequence[GroupLengths], bounds: tuple[int, int, int]):
    most, devices, pieces = bounds
    return microbatch_shapes(most, LONGEST, real_tokens(groups), devices, pieces)


# --- sizes ---


@pytest.mark.parametrize(("most", "longest", "total", "devices", "pieces"), SIZES)
def test_every_size_is_shorter_than_the_one_before(most, longest, total, devices, pieces):
    shapes = microbatch_shapes(most, longest, total, devices, pieces)
    assert 1 <= len(shapes) <= MOST_SIZES
    for larger, smaller in zip(shapes, shapes[1:], strict=False):
        assert smaller.tokens < larger.tokens
        assert abs(smaller.tokens - larger.tokens / SHRINKING) < pieces * ALIGNMENT
    for shape in shapes:
        assert (shape.rows, shape.pieces) == (devices // pieces, pieces)
        assert shape.tokens % (pieces * ALIGNMENT) == 0
        assert shape == shapes[0] or SHRINKING * shape.tokens >= longest


@pytest.mark.parametrize(("most", "longest", "total", "devices", "pieces"), SIZES)
def test_the_largest_size_keeps_all_bounds_but_has_room_for_the_longest(
    most, longest, total, devices, pieces
):
    largest = microbatch_shapes(most, longest, total, devices, pieces)[0]
    unit = pieces * ALIGNMENT
    assert largest.tokens >= longest
    if largest.tokens >= longest + unit:
        assert largest.size <= most
        assert largest.size < total + devices
        assert largest.tokens <= 8 * longest


# --- packing ---


@settings(max_examples=60)
@given(GROUPS, BOUNDS)
def test_every_trajectory_is_packed_exactly_once(groups, bounds):
    shapes = sizes_of(groups, bounds)
    packed = pack(groups, shapes)
    found = collections.Counter(
        (chunk.group, member)
        for microbatch in packed
        for row in microbatch.rows
        for chunk in row
        for member in chunk.members
    )
    wanted = {
        (n, member) for n, group in enumerate(groups) for member in range(len(group.suffixes))
    }
    assert set(found) == wanted and set(found.values()) == {1}


@settings(max_examples=60)
@given(GROUPS, BOUNDS)
def test_rows_and_micro_batches_keep_to_their_sizes(groups, bounds):
    shapes = sizes_of(groups, bounds)
    for microbatch in pack(groups, shapes):
        assert microbatch.shape in shapes
        assert 1 <= len(microbatch.rows) <= microbatch.shape.rows
        for row in microbatch.rows:
            assert row and all(chunk.members for chunk in row)
            tokens = sum(chunk_tokens(chunk, groups) for chunk in row)
            assert tokens <= microbatch.shape.tokens


@settings(max_examples=60)
@given(GROUPS, BOUNDS)
def test_no_micro_batch_is_larger_than_needed(groups, bounds):
    shapes = sizes_of(groups, bounds)
    for microbatch in pack(groups, shapes):
        smaller = [shape for shape in shapes if shape.tokens < microbatch.shape.tokens]
        chunks = [chunk for row in microbatch.rows for chunk in row]
        longest = max(chunk_tokens(chunk, groups) for chunk in chunks)
        tokens = sum(chunk_tokens(chunk, groups) for chunk in chunks)
        for shape in smaller:
            # One that holds the longest chunk and twice the tokens would do.
            assert longest > shape.tokens or 2 * tokens > shape.tokens * shape.rows


@settings(max_examples=60)
@given(GROUPS, BOUNDS, st.randoms(use_true_random=False))
def test_the_order_of_groups_and_rollouts_does_not_change_the_sizes(groups, bounds, random):
    shapes = sizes_of(groups, bounds)
    shuffled = [
        GroupLengths(prompt, tuple(random.sample(suffixes, len(suffixes))))
        for prompt, suffixes in random.sample(groups, len(groups))
    ]
    one, other = (pack(each, shapes) for each in (groups, shuffled))
    assert [microbatch.shape for microbatch in one] == [microbatch.shape for microbatch in other]


def test_a_group_that_fits_no_row_is_cut_and_its_prompt_repeated():
    group = GroupLengths(100, (200,) * 8)
    packed = pack([group], [MicrobatchShape(rows=1, tokens=768)])
    chunks = [chunk for microbatch in packed for row in microbatch.rows for chunk in row]
    assert sorted(len(chunk.members) for chunk in chunks) == [2, 3, 3]


def test_a_trajectory_without_room_is_refused_in_one_line():
    groups = [GroupLengths(10, (20,)), GroupLengths(100, (30, 200))]
    with pytest.raises(ValueError, match=r"batch\.tokens: 300 .* row of 256; raise ") as refusal:
        pack(groups, microbatch_shapes(256, 256, 10**4))
    assert "\n" not in str(refusal.value)
    assert pack(groups, microbatch_shapes(256, 300, 10**4))


# --- the shape of a step ---

LENGTHS = Lengths(prompt=100, visual=64, response=50, crop_prompt=30, report=8)


def test_figures_of_a_step():
    shape = StepShape(groups=3, rollouts=4, limits=LENGTHS)
    assert (shape.all_rollouts, shape.suffix, shape.trajectory) == (12, 50, 150)
    assert shape.tokens == 3 * (100 + 4 * 50)


@pytest.mark.parametrize(
    ("processes", "devices", "slots"),
    [(1, 1, 3 * 64), (1, 16, 12), (2, 2, 2 * 64), (2, 12, 22)],
)
def test_each_device_has_its_part_of_the_slots(processes, devices, slots):
    """A process plays at most two of three prompts."""
    shape = StepShape(groups=3, rollouts=4, limits=LENGTHS)
    assert shape.room(processes, devices).slots == slots


# --- first fit ---

TOKENS = st.lists(st.integers(1, 40), max_size=60)


def plainly(lengths, length):
    """First fit, said in the plainest words."""
    rows = []
    for sequence, tokens in enumerate(lengths):
        fitting = [row for row in rows if sum(lengths[n] for n in row) + tokens <= length]
        if fitting:
            fitting[0].append(sequence)
        elif tokens <= length:
            rows.append([sequence])
    return rows


@given(TOKENS, st.integers(1, 50))
def test_rows_are_filled_first_fit(lengths, length):
    assert first_fit(lengths, length) == plainly(lengths, length)
