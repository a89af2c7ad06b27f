"""Packs sequences into rows: conversations of SFT, and the trajectories of an RL step.

Conversations are packed first-fit into rows of one length (`first_fit`). Rows of RL have a few
compiled sizes, as follows.

Trajectories with a common prompt form a group. In a row, a group's prompt stands once, and its
trajectories attend to it. A group that does not fit into one row is cut into chunks, and the prompt
is repeated in each. Rows of one size form a micro-batch.

Only lengths matter here, so that every process packs alike and a plan can count without a model.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paravt_jax.method.protocol import Lengths

# Upper bound on the number of sizes. Each is compiled before the first step, for update and
# reference.
MOST_SIZES = 3
# Each size has rows shorter by this factor than the next larger one. Three such sizes leave about
# as little padding as four with a factor of 2.
SHRINKING = 2.5
# Row lengths are multiples of this, the lane width of a TPU.
ALIGNMENT = 128
# Largest row, in trajectories of the greatest length. Longer rows would hardly save time, and would
# make all sizes coarser.
_MOST_LONGEST = 8
# A micro-batch costs this share of the largest one, however short it is: weights are gathered and
# gradients added once per micro-batch.
_CHARGE = 1 / 32


@dataclasses.dataclass(frozen=True)
class MicrobatchShape:
    """Static sizes of a micro-batch.

    Args:
        rows: Packed rows.
        tokens: Tokens per row.
        pieces: Devices that share a row. Each holds an equal piece of it.
    """

    rows: int
    tokens: int
    pieces: int = 1

    @property
    def size(self) -> int:
        """Tokens of all rows, padding included."""
        return self.rows * self.tokens


class GroupLengths(NamedTuple):
    """Lengths, in tokens, of trajectories with a common prompt."""

    prompt: int
    """The prompt without its last token."""
    suffixes: tuple[int, ...]
    """What follows in each trajectory, from the last token of the prompt on."""


class Chunk(NamedTuple):
    """Some trajectories of a group, in one row behind their prompt."""

    group: int
    members: tuple[int, ...]
    """Numbers of the trajectories in their group."""


class PackedMicrobatch(NamedTuple):
    """The contents of a micro-batch: chunks by row. Rows at the end may be missing."""

    shape: MicrobatchShape
    rows: tuple[tuple[Chunk, ...], ...]


@dataclasses.dataclass(frozen=True)
class StepShape:
    """Upper bounds on the rollouts of a step.

    Args:
        groups: Prompts.
        rollouts: Rollouts per prompt.
        limits: Upper bounds on lengths, in tokens.
    """

    groups: int
    rollouts: int
    limits: Lengths

    @property
    def all_rollouts(self) -> int:
        """Rollouts of the step."""
        return self.groups * self.rollouts

    @property
    def suffix(self) -> int:
        """Tokens of the longest rollout, with the last token of its prompt."""
        return self.limits.response

    @property
    def trajectory(self) -> int:
        """Tokens of the longest trajectory, with its prompt."""
        return self.limits.prompt + self.limits.response

    @property
    def tokens(self) -> int:
        """Tokens of a step whose trajectories are all as long as they may be."""
        return self.groups * self.limits.prompt + self.all_rollouts * self.limits.response

    def room(self, processes: int, devices: int) -> VisualRoom:
        """Return the room, per device, for the frames that one process may provide."""
        prompts, own_devices = math.ceil(self.groups / processes), devices // processes
        slots, frames = (
            max(1, math.ceil(prompts * count / own_devices))
            for count in (self.limits.visual, self.limits.frames)
        )
        return VisualRoom(slots, frames)

    def microbatches(self, most: int, devices: int, pieces: int) -> tuple[MicrobatchShape, ...]:
        """Return the sizes of micro-batches of at most `most` tokens; see `microbatch_shapes`."""
        return microbatch_shapes(most, self.trajectory, self.tokens, devices, pieces)


class VisualRoom(NamedTuple):
    """Room, per device, for what one process may provide of the frames of a step."""

    slots: int
    """Visual tokens."""
    frames: int = 0
    """Frames. Only needed if the whole vision tower is trained."""


class StepRoom(NamedTuple):
    """What the arrays of a step have room for."""

    shape: StepShape
    """Upper bounds on the rollouts."""
    sizes: tuple[MicrobatchShape, ...]
    """The sizes of micro-batches, from `StepShape.microbatches`."""
    devices: int = 1
    """Devices of all processes, over which visual vectors are spread."""


def microbatch_shapes(
    most: int, longest_tokens: int, total: int, devices: int = 1, pieces: int = 1
) -> tuple[MicrobatchShape, ...]:
    """Return the sizes of micro-batches that are compiled, the largest first.

    Each has rows shorter than the one before by the factor `SHRINKING`, as long as they have room
    for the longest trajectory divided by it.

    Args:
        most: Upper bound on the tokens of a micro-batch over all devices. A row always has room for
            the longest trajectory.
        longest_tokens: Tokens of the longest trajectory with its prompt.
        total: Tokens of a whole step if every trajectory is as long as it may be.
        devices: Devices that rows are spread over.
        pieces: Devices that share a row; divides `devices`.
    """
    rows = devices // pieces
    unit = pieces * ALIGNMENT
    bounds = (most // rows, _MOST_LONGEST * longest_tokens, math.ceil(total / rows))
    # Rounded down, except where a row would have no room for the longest trajectory.
    largest = max(min(bounds) // unit * unit, _ceil_to(longest_tokens, unit))
    shorter = (_ceil_to(math.ceil(largest / SHRINKING**n), unit) for n in range(MOST_SIZES))
    lengths = {n for n in shorter if n == largest or SHRINKING * n >= longest_tokens}
    return tuple(MicrobatchShape(rows, length, pieces) for length in sorted(lengths, reverse=True))


def pack(
    groups: Sequence[GroupLengths], shapes: Sequence[MicrobatchShape]
) -> tuple[PackedMicrobatch, ...]:
    """Pack all trajectories into micro-batches with little padding.

    Tries each size for the rows and for the chunks into which long groups are cut, and takes what
    has the fewest tokens, padding and a charge per micro-batch included.

    Args:
        groups: Lengths of all trajectories.
        shapes: The sizes of micro-batches, from `microbatch_shapes`.

    Raises:
        ValueError: A trajectory is longer than the largest row.
    """
    longest = max(group.prompt + max(group.suffixes) for group in groups)
    lengths = [shape.tokens for shape in shapes]
    if longest > lengths[0]:
        raise ValueError(
            f"batch.tokens: {longest} tokens of a trajectory do not fit a row of {lengths[0]}; "
            "raise protocol.text_tokens or protocol.trajectory_tokens"
        )
    tried = [
        _packed(groups, row_tokens, most_of_chunk, shapes)
        for row_tokens, most_of_chunk in itertools.product(lengths, lengths)
        if max(most_of_chunk, longest) <= row_tokens
    ]
    charge = _CHARGE * shapes[0].size

    def cost(packed: Sequence[PackedMicrobatch]) -> float:
        return sum(microbatch.shape.size + charge for microbatch in packed)

    # `min` takes the first of equals: that with the longest rows and chunks.
    return min(tried, key=cost)


def chunk_tokens(chunk: Chunk, groups: Sequence[GroupLengths]) -> int:
    """Return the tokens of a chunk in its row: its prompt and its trajectories."""
    prompt, suffixes = groups[chunk.group]
    return prompt + sum(suffixes[member] for member in chunk.members)


def _packed(
    groups: Sequence[GroupLengths],
    row_tokens: int,
    most_of_chunk: int,
    shapes: Sequence[MicrobatchShape],
) -> tuple[PackedMicrobatch, ...]:
    """Pack rows of `row_tokens`, and then shrink every micro-batch as far as possible."""
    chunks = [
        chunk for number, group in enumerate(groups) for chunk in _cut(number, group, most_of_chunk)
    ]
    rows = _fill(chunks, groups, row_tokens)
    per_batch = shapes[0].rows
    batches = [rows[first : first + per_batch] for first in range(0, len(rows), per_batch)]
    return tuple(_shrunk(batch, groups, shapes) for batch in batches)


def _cut(number: int, group: GroupLengths, most: int) -> list[Chunk]:
    """Cut a group into few chunks of at most `most` tokens, longest trajectories first.

    A trajectory that is longer than `most` gets a chunk of its own.
    """
    order = sorted(range(len(group.suffixes)), key=lambda n: -group.suffixes[n])
    room = max(1, most - group.prompt)
    chunks = first_fit([min(group.suffixes[n], room) for n in order], room)
    return [Chunk(number, tuple(sorted(order[n] for n in chunk))) for chunk in chunks]


def _fill(
    chunks: Sequence[Chunk], groups: Sequence[GroupLengths], tokens: int
) -> list[tuple[Chunk, ...]]:
    """Put every chunk, the longest first, into the first row that has room for it."""
    order = sorted(chunks, key=lambda chunk: -chunk_tokens(chunk, groups))
    rows = first_fit([chunk_tokens(chunk, groups) for chunk in order], tokens)
    return [tuple(order[n] for n in row) for row in rows]


def _shrunk(
    rows: Sequence[tuple[Chunk, ...]],
    groups: Sequence[GroupLengths],
    shapes: Sequence[MicrobatchShape],
) -> PackedMicrobatch:
    """Return the chunks of a micro-batch in the smallest size that holds them."""
    chunks = [chunk for row in rows for chunk in row]
    longest = max(chunk_tokens(chunk, groups) for chunk in chunks)
    for shape in sorted(shapes, key=lambda shape: shape.tokens):
        if shape.tokens < longest:
            continue
        packed = _fill(chunks, groups, shape.tokens)
        if len(packed) <= shape.rows:
            return PackedMicrobatch(shape, tuple(packed))
    raise AssertionError("the rows came from one of these sizes")


def _ceil_to(value: int, unit: int) -> int:
    """Return `value` rounded up to a multiple of `unit`."""
    return -(-value // unit) * unit


def first_fit(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Put each sequence into the first row with enough room, or into a new row.

    The result depends only on the lengths and their order.

    Args:
        lengths: Tokens of each sequence, at least 1.
        length: Tokens per row. Longer sequences are left out.

    Returns:
        The numbers of the sequences of each row, in order.

    Example:
        >>> first_fit([3, 4, 2, 9], length=5)
        [[0, 2], [1]]
    """
    rows: list[list[int]] = []
    # Free tokens of every row, those without a sequence included.
    free = np.full(len(lengths), length)
    for sequence, tokens in enumerate(lengths):
        if tokens > length:
            continue
        row = int(np.argmax(free[: len(rows) + 1] >= tokens))
        if row == len(rows):
            rows.append([])
        rows[row].append(sequence)
        free[row] -= tokens
    return rows
