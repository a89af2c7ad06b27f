"""Arrays of a batch in which the rollouts of a group share one prompt.

A prompt is computed once per group. Each row then attends to it:

    group of 2 rollouts of the prompt a b c d
        prompt_ids   a b c . .      all but the last prompt token, padded on the right
        ids          d x y t z .    row 0: the last prompt token, then what follows
                     d u v . . .    row 1
        sampled      0 1 1 0 1 0    row 0: the model wrote x, y and z; t is a tool response
                     0 1 1 0 0 0    row 1

The last prompt token belongs to the rows because its output predicts their first sampled token.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import no_type_check

import jax
import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int

from models.features import FrameFeatures
from models.qwen3_vl.rope import mrope_positions, next_position
from paravt_jax.method.records import Author, Segment, Trajectory, digest

Array = np.ndarray | jax.Array
"""NumPy arrays while a batch is built; JAX arrays once it is placed on a mesh."""


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """Static sizes of a batch.

    Args:
        groups: Number of prompts.
        rows: Rollouts per prompt.
        prompt: Length of the shared prompt in tokens.
        visual: Number of visual tokens in the prompt; may be 0.
        suffix: Length of a row in tokens: all that follows the shared prompt.
    """

    groups: int
    rows: int
    prompt: int
    visual: int
    suffix: int

    def __post_init__(self):
        for name in ("groups", "rows", "prompt", "suffix"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"BatchShape.{name}: {value}; give a whole number of at least 1")
        if self.visual < 0:
            raise ValueError(f"BatchShape.visual: {self.visual}; give 0 or more tokens")


# Annotations are not checked, because JAX also builds this tree with shardings as leaves or with
# micro-batches as a further axis.
@no_type_check
@struct.dataclass
class Sequences:
    """A batch: p prompts, and b = p * g rows that continue them, group after group.

    `visual` holds m visual tokens per prompt, each with c vectors: one for the embedding layer and
    one per DeepStack level. Segments are 1 for tokens and 0 for padding. `sampled` marks the tokens
    that the model wrote: they have log-probs and a loss. `logprobs` are the sampler's, 0 elsewhere.
    """

    prompt_ids: Int[Array, "p s"]
    prompt_positions: Int[Array, "3 p s"]
    prompt_segments: Int[Array, "p s"]
    visual: Float[Array, "p m c d"]
    ids: Int[Array, "b t"]
    positions: Int[Array, "3 b t"]
    segments: Int[Array, "b t"]
    sampled: Bool[Array, "b t"]
    logprobs: Float[Array, "b t"]


def prompt_segments(trajectory: Trajectory) -> tuple[Segment, ...]:
    """The segments before an agent's first response."""
    return tuple(itertools.takewhile(lambda s: s.author is Author.PROMPT, trajectory.segments))


def build(
    groups: Sequence[Sequence[Trajectory]], features: FrameFeatures, shape: BatchShape
) -> Sequences:
    """Lay trajectories out as arrays of a static shape.

    Args:
        groups: Groups of trajectories that begin with the same prompt.
        features: Encodes the frames of the prompts.
        shape: Sizes of the arrays; missing groups and rows become padding.

    Returns:
        NumPy arrays.

    Raises:
        ValueError: A trajectory does not fit `shape`.
    """
    arrays = _padding(features, shape)
    _check(len(groups), shape.groups, "groups")
    for p, group in enumerate(groups):
        _check(len(group), shape.rows, "rows")
        length, first = _write_prompt(arrays, p, group[0], features, shape)
        for g, trajectory in enumerate(group):
            _write_row(arrays, p * shape.rows + g, trajectory, length, first, shape)
    return Sequences(**arrays)


def _padding(features: FrameFeatures, shape: BatchShape) -> dict[str, np.ndarray]:
    """The arrays of a batch that contains only padding."""
    config = features.config
    rows = shape.groups * shape.rows
    levels = 1 + config.vision.levels
    visual = (shape.groups, shape.visual, levels, config.text.hidden_size)
    return {
        "prompt_ids": np.zeros((shape.groups, shape.prompt), np.int32),
        "prompt_positions": np.zeros((3, shape.groups, shape.prompt), np.int32),
        "prompt_segments": np.zeros((shape.groups, shape.prompt), np.int32),
        "visual": np.zeros(visual, np.float32),
        "ids": np.zeros((rows, shape.suffix), np.int32),
        "positions": np.zeros((3, rows, shape.suffix), np.int32),
        "segments": np.zeros((rows, shape.suffix), np.int32),
        "sampled": np.zeros((rows, shape.suffix), bool),
        "logprobs": np.zeros((rows, shape.suffix), np.float32),
    }


def _write_prompt(
    arrays: dict[str, np.ndarray],
    p: int,
    trajectory: Trajectory,
    features: FrameFeatures,
    shape: BatchShape,
) -> tuple[int, int]:
    """Write the prompt of `trajectory` as prompt `p`; returns its length and the next position."""
    segments = prompt_segments(trajectory)
    frames = [frame for segment in segments for frame in segment.frames]
    grids = [features.grid(frame) for frame in frames]
    # Without the last token: each row begins with it.
    ids = np.concatenate([segment.ids for segment in segments])[:-1]
    length = len(ids)
    _check(length, shape.prompt, "prompt")
    # A frame's tokens share positions, so the next position is not the prompt's length.
    positions = mrope_positions(ids, grids, features.config)
    arrays["prompt_ids"][p, :length] = ids
    arrays["prompt_segments"][p, :length] = 1
    arrays["prompt_positions"][:, p, :length] = positions
    if frames:
        vectors = features(frames)
        _check(len(vectors), shape.visual, "visual")
        arrays["visual"][p, : len(vectors)] = vectors
    return length, next_position(positions)


def _write_row(
    arrays: dict[str, np.ndarray],
    row: int,
    trajectory: Trajectory,
    length: int,
    first_position: int,
    shape: BatchShape,
) -> None:
    """Write as row `row` what follows the shared prompt of `length` tokens."""
    ids = trajectory.ids[length:]
    _check(len(ids), shape.suffix, "suffix")
    part = slice(0, len(ids))
    arrays["ids"][row, part] = ids
    arrays["segments"][row, part] = 1
    # Only prompts have frames, so positions advance by one in all three components.
    arrays["positions"][:, row, part] = first_position + np.arange(len(ids))
    arrays["sampled"][row, part] = trajectory.authors[length:] == Author.MODEL
    arrays["logprobs"][row, part] = trajectory.logprobs[length:]


def mismatches(batch: Sequences, groups: Sequence[Sequence[Trajectory]]) -> int:
    """Count the rows whose token ids differ from the ids that the sampler read and wrote.

    With each response, the sampler stores a digest of all ids up to its end. The last digest of a
    trajectory is compared with the ids in the arrays.
    """
    rows_per_group = len(batch.ids) // len(batch.prompt_ids)
    count = 0
    for p, group in enumerate(groups):
        prompt = batch.prompt_ids[p][batch.prompt_segments[p] > 0]
        for g, trajectory in enumerate(group):
            digests = [
                segment.digest
                for segment in trajectory.segments
                if segment.author is Author.MODEL and len(segment.ids)
            ]
            if not digests:
                continue
            row = p * rows_per_group + g
            # The last digest ends with the last sampled token; a tool response may follow.
            end = int(np.flatnonzero(batch.sampled[row]).max(initial=-1)) + 1
            ids = np.concatenate([prompt, batch.ids[row, :end]])
            count += digest(ids) != digests[-1]
    return count


def _check(length: int, limit: int, field: str) -> None:
    if length > limit:
        raise ValueError(
            f"batch.{field}: {length} does not fit the static size {limit}; {_REMEDIES[field]}"
        )


# In a run, shapes follow from settings that were checked at the start. These errors therefore mean
# that a shape was given by hand, or that the code has a bug.
_REMEDIES = {
    "groups": "raise rl.prompts",
    "rows": "raise rl.grpo.group_size",
    "prompt": "raise protocol.text_tokens or protocol.label_tokens",
    "visual": "lower frames.max_pixels, or raise the largest frame budget",
    "suffix": "raise protocol.trajectory_tokens (of a sub-agent, protocol.summary_tokens)",
}
