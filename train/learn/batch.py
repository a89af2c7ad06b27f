"""Arrays of a micro-batch of RL: packed rows in which the rollouts of a group share one prompt.

A row begins with the shared prompts of its groups. Then come segments: a rollout from the last
token of its prompt on, or a trajectory whose prompt nothing else in the row shares.

    row of 16 tokens: two rollouts of the prompt a b c d, and one of another, k l m n
        token          0 1 2  3 4 5 6 7  8 9 10  11 12 13 14  15
        ids            a b c  d x y t z  d u v   k  l  m  n   .
        segments       1 1 1  1 1 1 1 1  1 1 1   2  2  2  2   0     the group; 0 is padding
        starts         0 0 0  3 3 3 3 3  8 8 8   11 11 11 11  0     where the segment begins
        shared         3                                            tokens of shared prompts

A token sees earlier tokens of its group that are in its own segment or in the shared prompts
(`models.attention.RowLayout`). The last prompt token belongs to the rollouts because its output
predicts their first sampled token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, no_type_check

import jax
import numpy as np
from flax import struct
from jaxtyping import Int

from models.attention import RowLayout
from models.config import ModelConfig
from models.rope import mrope_positions, next_position, visual_index
from paravt_jax.method.records import Author, Trajectory, digest
from rollout.agent.episode import split_prompt
from train.learn.packing import Chunk, GroupLengths, MicrobatchShape, PackedMicrobatch

Array = np.ndarray | jax.Array
"""NumPy arrays while a batch is built; JAX arrays once it is placed on a mesh."""


# Annotations are not checked, because JAX also builds this tree with shardings as leaves.
@no_type_check
@struct.dataclass
class Microbatch:
    """Packed rows, and where each rollout's tokens are in them.

    There are b = rows * pieces arrays of t tokens: a packed row is cut into `pieces`, one per
    device. `starts` and `shared` count tokens of the whole row; they are None if no segment sees
    another one's tokens, so that any attention kernel can compute the rows. `visual_index` is the
    slot of a token's vectors in the step's bank, -1 for text.

    `index` has the u tokens of each of the step's r rollouts: their indices, counted over all rows,
    and -1 for tokens that are not in this micro-batch. A rollout's first token is the last one of
    its prompt.
    """

    ids: Int[Array, "b t"]
    positions: Int[Array, "3 b t"]
    segments: Int[Array, "b t"]
    starts: Int[Array, "b t"] | None
    shared: Int[Array, " b"] | None
    visual_index: Int[Array, "b t"]
    index: Int[Array, "r u"]
    pieces: int = struct.field(pytree_node=False, default=1)

    @property
    def layout(self) -> RowLayout:
        """What each token of the rows sees."""
        return RowLayout(self.segments, starts=self.starts, shared=self.shared, pieces=self.pieces)


class Group(NamedTuple):
    """Trajectories that begin with the same prompt."""

    trajectories: tuple[Trajectory, ...]
    rollout: int
    """Index of the first trajectory among the step's rollouts; the others follow."""
    grids: tuple[tuple[int, int], ...]
    """Height and width, in patches, of the prompt's frames."""
    slot: int
    """Slot of the prompt's first visual vector in the step's bank; the others follow."""

    @property
    def prompt(self) -> Int[np.ndarray, " s"]:
        """The ids of the prompt, without its last token."""
        return split_prompt(self.trajectories[0])[0]

    @property
    def lengths(self) -> GroupLengths:
        """What `packing.pack` needs to know."""
        prompt = len(self.prompt)
        return GroupLengths(prompt, tuple(len(t.ids) - prompt for t in self.trajectories))


def build(
    packed: PackedMicrobatch,
    groups: Sequence[Group],
    config: ModelConfig,
    rollouts: int,
    suffix: int,
) -> Microbatch:
    """Lay out a micro-batch.

    Args:
        packed: Which trajectories are in which row.
        groups: All groups of the step.
        config: Gives positions and placeholders of visual tokens.
        rollouts: The number r of rollouts in `Microbatch.index`.
        suffix: Its width u, the length of the longest rollout.

    Returns:
        NumPy arrays.
    """
    shape = packed.shape
    index = np.full((rollouts, suffix), -1, np.int32)
    arrays = padding(shape)
    for row, chunks in enumerate(packed.rows):
        _write_row(arrays, row, chunks, groups, index, config)
    # Every piece of a row repeats the number of its shared tokens.
    shared = arrays.pop("shared").repeat(shape.pieces)
    cut = {
        name: x.reshape(*x.shape[:-2], shape.rows * shape.pieces, -1) for name, x in arrays.items()
    }
    return Microbatch(**cut, shared=shared, index=index, pieces=shape.pieces)


def padding(shape: MicrobatchShape) -> dict[str, np.ndarray]:
    """Return the arrays by row of a micro-batch that contains only padding."""
    size = (shape.rows, shape.tokens)
    return {
        "ids": np.zeros(size, np.int32),
        "positions": np.zeros((3, *size), np.int32),
        "segments": np.zeros(size, np.int32),
        "starts": np.zeros(size, np.int32),
        "visual_index": np.full(size, -1, np.int32),
        "shared": np.zeros(shape.rows, np.int32),
    }


def _write_row(
    arrays: dict[str, np.ndarray],
    row: int,
    chunks: Sequence[Chunk],
    groups: Sequence[Group],
    index: np.ndarray,
    config: ModelConfig,
) -> None:
    """Write the chunks of a row: all shared prompts, and then the segments."""
    end = 0
    # A prompt of a single trajectory is part of its segment. Groups are numbered in their order in
    # the row, by which kernels skip tiles (`visible_tiles`).
    ordered = sorted(chunks, key=lambda chunk: len(chunk.members) == 1)
    shared_first = list(enumerate(ordered, 1))
    prompts: dict[int, PackedTokens] = {}
    for segment, chunk in shared_first:
        group = groups[chunk.group]
        prompts[segment] = shown_tokens(group.prompt, group.grids, group.slot, config)
        if len(chunk.members) > 1:
            end = write(arrays, row, end, end, segment, prompts[segment])
    arrays["shared"][row] = end
    for segment, chunk in shared_first:
        group = groups[chunk.group]
        prompt = prompts[segment]
        for member in chunk.members:
            begin = end
            if len(chunk.members) == 1:
                end = write(arrays, row, end, begin, segment, prompt)
            suffix = _suffix_tokens(group.trajectories[member], prompt)
            indices = row * arrays["ids"].shape[1] + end + np.arange(len(suffix.ids))
            index[group.rollout + member, : len(indices)] = indices
            end = write(arrays, row, end, begin, segment, suffix)


class PackedTokens(NamedTuple):
    """Tokens that stand side by side in a row."""

    ids: Int[np.ndarray, " n"]
    positions: Int[np.ndarray, "3 n"]
    slots: Int[np.ndarray, " n"]


def shown_tokens(
    ids: Int[np.ndarray, " n"],
    grids: Sequence[tuple[int, int]],
    slot: int,
    config: ModelConfig,
) -> PackedTokens:
    """Return tokens from position 0 on, whose frames have their vectors in the bank from `slot`
    on."""
    slots = visual_index(ids, config.image_token_id)
    slots = np.where(slots < 0, -1, slot + slots)
    return PackedTokens(ids, mrope_positions(ids, grids, config), slots)


def _suffix_tokens(trajectory: Trajectory, prompt: PackedTokens) -> PackedTokens:
    ids = trajectory.ids[len(prompt.ids) :]
    # Only prompts have frames, so positions advance by one in all three components. A frame's
    # tokens share positions, so the first one is not the prompt's length.
    positions = next_position(prompt.positions) + np.arange(len(ids))
    return PackedTokens(ids, np.broadcast_to(positions, (3, len(ids))), np.full(len(ids), -1))


def write(
    arrays: dict[str, np.ndarray],
    row: int,
    offset: int,
    begin: int,
    segment: int,
    tokens: PackedTokens,
) -> int:
    """Write tokens of the segment that begins at `begin`; returns the offset after them."""
    end = offset + len(tokens.ids)
    written = slice(offset, end)
    arrays["ids"][row, written] = tokens.ids
    arrays["positions"][:, row, written] = tokens.positions
    arrays["segments"][row, written] = segment
    arrays["starts"][row, written] = begin
    arrays["visual_index"][row, written] = tokens.slots
    return end


def mismatches(batches: Sequence[Microbatch], groups: Sequence[Group]) -> int:
    """Count the trajectories whose ids in the arrays differ from what the sampler read and wrote.

    With each response, the sampler stores a digest of all ids up to its end. The last digest of a
    trajectory is compared with the ids that its last sampled token attends to.
    """
    count = 0
    for batch in batches:
        for group in groups:
            for number, trajectory in enumerate(group.trajectories):
                indices = np.asarray(batch.index[group.rollout + number])
                if indices[0] >= 0:
                    count += _differs(batch, indices[indices >= 0], trajectory)
    return count


def _differs(batch: Microbatch, indices: np.ndarray, trajectory: Trajectory) -> bool:
    segments = trajectory.segments
    sampled = [n for n, s in enumerate(segments) if s.author is Author.MODEL and len(s.ids)]
    if not sampled:
        return False
    assert batch.shared is not None, "rows of rollouts have starts"
    last = sampled[-1]
    # A tool response may follow the last sampled token.
    after = sum(len(segment.ids) for segment in segments[last + 1 :])
    tokens = batch.pieces * batch.ids.shape[1]
    row, token = divmod(int(indices[len(indices) - after - 1]), tokens)
    ids, numbers, starts = (
        np.asarray(x).reshape(-1, tokens)[row] for x in (batch.ids, batch.segments, batch.starts)
    )
    # The rule of `models.attention.RowLayout`.
    keys = np.arange(tokens)
    own = keys >= starts[token]
    shared = keys < batch.shared[row * batch.pieces]
    visible = (numbers == numbers[token]) & (keys <= token) & (own | shared)
    return digest(ids[visible]) != segments[last].digest
