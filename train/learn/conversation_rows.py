"""Rows of demonstrations: several conversations per row, which do not attend to each other.

They have the layout of `train.learn.batch`: each conversation is a segment of its own, and nothing
is shared, so there are no `starts`. To the loss, a row is one rollout:

    row of 12 tokens with two conversations
        ids        a b c d e  p q r s  . . .
        segments   1 1 1 1 1  2 2 2 2  0 0 0    attention stays within a segment
        positions  0 1 2 3 4  0 1 2 3  0 0 0    each conversation starts at 0
        mask       0 0 1 1 1  0 0 1 1  0 0 0    the assistant's tokens have a loss

A conversation has the same ids, positions and visual vectors as in a row of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Shaped

from models.config import VisionConfig
from models.features import FrameFeatures, FrameSettings
from paravt_jax.data.frames import VideoError
from paravt_jax.method.conversations import Conversation, render
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import Author, Trajectory
from train.learn.batch import Microbatch, padding, shown_tokens, write
from train.learn.packing import MicrobatchShape, VisualRoom


@dataclasses.dataclass(frozen=True)
class RowsShape:
    """Static sizes of a step: rows, and tokens, visual tokens and frames per row."""

    rows: int
    tokens: int
    visual: int
    frames: int = 0
    """Only needed if the whole vision tower is trained."""
    microbatches: int = 1
    """Micro-batches that the rows are split into."""

    def fitted(self, limit: int, devices: int) -> RowsShape:
        """Return the shape with at most `limit` micro-batches, each with equal rows per device.

        Micro-batches are few enough to give each device a row. Missing rows are padding.
        """
        count = min(limit, math.ceil(self.rows / devices))
        multiple = devices * count
        rows = math.ceil(self.rows / multiple) * multiple
        return dataclasses.replace(self, rows=rows, microbatches=count)

    def room(self, devices: int) -> VisualRoom:
        """Return the room per device for what is shown in its rows."""
        rows = self.rows // devices
        return VisualRoom(rows * self.visual, rows * self.frames)

    @property
    def microbatch(self) -> MicrobatchShape:
        """Sizes of a micro-batch."""
        return MicrobatchShape(self.rows // self.microbatches, self.tokens)


class Rendered(NamedTuple):
    """A conversation as the trainer sees it, with what is cached of its frames.

    The vectors are kept here because a row may have more frames than `FrameFeatures` stores.
    """

    trajectory: Trajectory
    vectors: Float[np.ndarray, "m c d"] | None


class OwnRows(NamedTuple):
    """This process's rows of a step, in the host's memory."""

    microbatches: tuple[Microbatch, ...]
    """Its share of every micro-batch."""
    mask: Bool[np.ndarray, "r t"]
    """The tokens with a loss."""
    visual: Shaped[np.ndarray, "m c d"]
    """What is cached of its frames, per visual token, row after row."""
    grids: tuple[tuple[int, int], ...]
    """Height and width of its frames, in patches."""


def render_rows(
    rows: Sequence[Sequence[Conversation]], protocol: Protocol, features: FrameFeatures
) -> tuple[list[list[Rendered]], dict[str, VideoError]]:
    """Render each row's conversations and encode their frames.

    A conversation is missing from its row if one of its files cannot be read, or has changed since
    the data was prepared. Its tokens become padding.

    Returns:
        The rendered conversations of each row, and the errors by the id of the missing ones.
    """
    rendered: list[list[Rendered]] = []
    missing: dict[str, VideoError] = {}
    for row in rows:
        readable = []
        for conversation in row:
            try:
                readable.append(_render(conversation, protocol, features))
            except VideoError as error:
                missing[conversation.id] = error
        rendered.append(readable)
    return rendered, missing


def _render(conversation: Conversation, protocol: Protocol, features: FrameFeatures) -> Rendered:
    trajectory = render(conversation, protocol, lambda clip: features.tokens(clip.frames[0]))
    # `tokens` is the length found by preparation, which packed the row; 0: not counted.
    if conversation.tokens not in (0, len(trajectory.ids)):
        path = conversation.clips[0].path
        raise VideoError(path, "its frames have another size than when it was prepared")
    vectors = features.cached(trajectory.frames) if trajectory.frames else None
    return Rendered(trajectory, vectors)


def most_visual(
    rows: Iterable[Sequence[Conversation]], settings: FrameSettings, vision: VisionConfig
) -> int:
    """Return the largest number of visual tokens in a row, by the sizes that preparation found in
    files.

    Args:
        rows: Conversations, row by row.
        settings: How frames are resized.
        vision: Sizes of the vision tower.
    """
    rules = {crop: settings.rules(vision, crop) for crop in (False, True)}

    def tokens(conversation: Conversation) -> int:
        # Frames that cannot be resized are refused when they are read.
        with contextlib.suppress(ValueError):
            return sum(
                len(clip.indices) * rules[clip.crop].tokens(clip.height, clip.width)
                for clip in conversation.clips
            )
        return 0

    return max(sum(map(tokens, row)) for row in rows)


def most_frames(rows: Iterable[Sequence[Conversation]]) -> int:
    """Return the largest number of frames in a row."""
    return max(sum(len(clip.indices) for chat in row for clip in chat.clips) for row in rows)


def lay_out_rows(
    rows: Sequence[Sequence[Rendered]], features: FrameFeatures, shape: RowsShape, devices: int
) -> OwnRows:
    """Lay out this process's share of a step; missing rows become padding.

    Args:
        rows: Rendered conversations, row by row.
        features: Says how many patches a frame has.
        shape: Sizes of the whole step.
        devices: Devices of all processes that rows are spread over.

    Raises:
        ValueError: A row's tokens or visual tokens do not fit `shape`.
    """
    processes = jax.process_count()
    count = shape.rows // processes
    arrays = padding(MicrobatchShape(count, shape.tokens))
    mask = np.zeros((count, shape.tokens), bool)
    slot = jax.process_index() * shape.room(devices).slots * (devices // processes)
    vectors = [np.zeros((0, *features.vector), features.dtype)]
    grids: list[tuple[int, int]] = []
    for r, row in enumerate(rows):
        _check(sum(len(trajectory.ids) for trajectory, _ in row), shape.tokens, "tokens")
        end, first_slot, first_frame = 0, slot, len(grids)
        for segment, (trajectory, cached) in enumerate(row, 1):
            own = [features.grid(frame) for frame in trajectory.frames]
            tokens = shown_tokens(trajectory.ids, own, slot, features.config)
            begin = end
            end = write(arrays, r, begin, begin, segment, tokens)
            mask[r, begin:end] = trajectory.authors == Author.MODEL
            visual = int((tokens.slots >= 0).sum())
            held = 0 if cached is None else len(cached)
            # Vectors follow each other without gaps: one too many would shift all after it.
            assert held == visual, f"{held} vectors for {visual} visual tokens"
            vectors += [] if cached is None else [cached]
            grids += own
            slot += visual
        changed = "prepare the data again: files have changed"
        _check(slot - first_slot, shape.visual, "visual", changed)
        if shape.frames:
            _check(len(grids) - first_frame, shape.frames, "frames", changed)
    microbatches = tuple(_microbatch(arrays, shape, number) for number in range(shape.microbatches))
    return OwnRows(microbatches, mask, np.concatenate(vectors), tuple(grids))


def _microbatch(arrays: dict[str, np.ndarray], shape: RowsShape, number: int) -> Microbatch:
    """Return this process's rows of a micro-batch, and where all of its rows are in the step."""
    own = len(arrays["ids"]) // shape.microbatches
    rows = slice(number * own, (number + 1) * own)
    names = ("ids", "positions", "segments", "visual_index")
    cut: dict[str, Any] = {name: arrays[name][..., rows, :] for name in names}
    # Every process has consecutive rows of the step, and of each micro-batch.
    index = np.full((jax.process_count(), shape.microbatches, own, shape.tokens), -1, np.int32)
    tokens = np.arange(shape.microbatch.size, dtype=np.int32)
    index[:, number] = tokens.reshape(jax.process_count(), own, shape.tokens)
    return Microbatch(
        **cut, starts=None, shared=None, index=index.reshape(shape.rows, shape.tokens)
    )


def _check(
    length: int, limit: int, field: str, remedy: str = "raise sft.row_tokens or sft.rows"
) -> None:
    if length > limit:
        raise ValueError(f"rows.{field}: {length} do not fit the static size {limit}; {remedy}")
