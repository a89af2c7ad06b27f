"""Trajectories into arrays: rows of a group share one prompt, which is computed once.

Owns padding and the cut between what a group shares and what each row has of its own. Invariant: the rows' ids are the
trajectories' ids; `mismatches` counts, from the arrays, the rows that are not what the sampler was fed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int

from models.features import FrameFeatures
from models.qwen3_vl.rope import mrope_positions, next_position
from paravt_jax.method.records import Author, Segment, Trajectory, digest


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """Static lengths in tokens: shared prompt, visual tokens in it, and a row's own part; and groups and rows of a group."""

    groups: int
    rows: int
    prompt: int
    visual: int
    suffix: int

    def __post_init__(self):
        for name in ("groups", "rows", "prompt", "suffix"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"BatchShape.{name}: {getattr(self, name)}; give a whole number of at least 1"
                )
        if self.visual < 0:
            raise ValueError(f"BatchShape.visual: {self.visual}; give 0 or more tokens")


@struct.dataclass
class Sequences:
    """A batch: p prompts and b = p * g rows that continue them. Segments are 1 for tokens, 0 for padding (on the right)."""

    prompt_ids: Int[np.ndarray, "p s"]
    prompt_positions: Int[np.ndarray, "3 p s"]
    prompt_segments: Int[np.ndarray, "p s"]
    visual: Float[np.ndarray, "p m c d"]
    ids: Int[np.ndarray, "b t"]
    positions: Int[np.ndarray, "3 b t"]
    segments: Int[np.ndarray, "b t"]
    sampled: Bool[np.ndarray, "b t"]  # tokens the model wrote: those with log-probs and loss
    logprobs: Float[np.ndarray, "b t"]  # the sampler's, 0 elsewhere


def prompt_segments(trajectory: Trajectory) -> tuple[Segment, ...]:
    """What an agent is given before its first response."""
    return tuple(itertools.takewhile(lambda s: s.author is Author.PROMPT, trajectory.segments))


def build(
    groups: Sequence[Sequence[Trajectory]], features: FrameFeatures, shape: BatchShape
) -> Sequences:
    """Arrays of `groups`, each of one prompt; missing groups and rows are padding. Raises ValueError
    where a trajectory does not fit the shape."""
    config = features.config
    levels = 1 + config.vision.levels
    rows = shape.groups * shape.rows
    batch = Sequences(
        prompt_ids=np.zeros((shape.groups, shape.prompt), np.int32),
        prompt_positions=np.zeros((3, shape.groups, shape.prompt), np.int32),
        prompt_segments=np.zeros((shape.groups, shape.prompt), np.int32),
        visual=np.zeros((shape.groups, shape.visual, levels, config.text.hidden_size), np.float32),
        ids=np.zeros((rows, shape.suffix), np.int32),
        positions=np.zeros((3, rows, shape.suffix), np.int32),
        segments=np.zeros((rows, shape.suffix), np.int32),
        sampled=np.zeros((rows, shape.suffix), bool),
        logprobs=np.zeros((rows, shape.suffix), np.float32),
    )
    _check(len(groups), shape.groups, "groups")
    for p, group in enumerate(groups):
        _check(len(group), shape.rows, "rows")
        shared = prompt_segments(group[0])
        # The prompt's last token predicts each row's first one, so it stands with the row.
        prompt = np.concatenate([segment.ids for segment in shared])[:-1]
        frames = [frame for s in shared for frame in s.frames]
        length = len(prompt)
        _check(length, shape.prompt, "prompt")
        batch.prompt_ids[p, :length], batch.prompt_segments[p, :length] = prompt, 1
        positions = mrope_positions(prompt, [features.grid(f.video) for f in frames], config)
        batch.prompt_positions[:, p, :length] = positions
        if frames:
            vectors = features(frames)
            _check(len(vectors), shape.visual, "visual")
            batch.visual[p, : len(vectors)] = vectors
        for g, trajectory in enumerate(group):
            own = trajectory.ids[length:]
            _check(len(own), shape.suffix, "suffix")
            row, part = p * shape.rows + g, slice(0, len(own))
            batch.ids[row, part], batch.segments[row, part] = own, 1
            batch.positions[:, row, part] = next_position(positions) + np.arange(len(own))
            batch.sampled[row, part] = trajectory.authors[length:] == Author.MODEL
            batch.logprobs[row, part] = trajectory.logprobs[length:]
    return batch


def mismatches(batch: Sequences, groups: Sequence[Sequence[Trajectory]]) -> int:
    """Rows whose ids in the arrays, up to the last sampled token, are not those the sampler says it was fed and wrote."""
    count, rows = 0, len(batch.ids) // len(batch.prompt_ids)
    for p, group in enumerate(groups):
        prompt = batch.prompt_ids[p][batch.prompt_segments[p] > 0]
        for g, trajectory in enumerate(group):
            row = p * rows + g
            end = int(np.flatnonzero(batch.sampled[row]).max(initial=-1)) + 1
            written = [
                s.digest for s in trajectory.segments if s.author is Author.MODEL and len(s.ids)
            ]
            count += (
                bool(written)
                and digest(np.concatenate([prompt, batch.ids[row, :end]])) != written[-1]
            )
    return count


def _check(length: int, limit: int, field: str) -> None:
    if length > limit:
        raise ValueError(
            f"batch.{field}: {length} does not fit the static size {limit}; {_REMEDIES[field]}"
        )


# Shapes follow from settings that are checked before a run begins, so none of this is expected.
_REMEDIES = {
    "groups": "raise rl.prompts",
    "rows": "raise rl.grpo.group_size",
    "prompt": "raise protocol.text_tokens or protocol.label_tokens",
    "visual": "lower frames.max_pixels, or raise the largest frame budget",
    "suffix": "raise protocol.trajectory_tokens (of a sub-agent, protocol.summary_tokens)",
}
