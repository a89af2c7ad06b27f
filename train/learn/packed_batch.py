"""Arrays of packed rows: several conversations per row, which do not attend to each other.

    row of 12 tokens with two conversations
        ids        a b c d e  p q r s  . . .
        segments   1 1 1 1 1  2 2 2 2  0 0 0    attention stays within a segment
        positions  0 1 2 3 4  0 1 2 3  0 0 0    each conversation starts at 0
        sampled    0 0 1 1 1  0 0 1 1  0 0 0    the assistant's tokens have a loss

A conversation has the same ids, positions and visual vectors as in a row of its own. Visual vectors
stay apart from the other arrays until they are on the devices: no padding travels (`place_packed`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, Shaped

from models.config import VisionConfig
from models.features import FrameFeatures, FrameSettings
from models.rope import mrope_positions
from models.sharding import ROWS, constrain, row_devices
from models.trained_vision import TrainedVision
from paravt_jax.data.frames import VideoError
from paravt_jax.method.conversations import Conversation, render
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import Author, Trajectory
from train.learn.batch import Array
from train.learn.placement import BY_ROW, place, place_vectors


@dataclasses.dataclass(frozen=True)
class PackedShape:
    """Static sizes of a batch: rows, and tokens, visual tokens and frames per row."""

    rows: int
    tokens: int
    visual: int
    frames: int = 0
    """Only needed if the whole vision tower is trained."""

    def __post_init__(self):
        for name in ("rows", "tokens", "visual"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"PackedShape.{name}: {value}; give a whole number of at least 1")

    def room(self, vision: TrainedVision | None) -> int:
        """Entries per row of what is cached of frames. A tower that is trained has them padded."""
        if vision is None or not vision.whole:
            return self.visual
        return self.frames * vision.frame_tokens


# Annotations are not checked, for the same reason as in `Microbatch`.
@no_type_check
@struct.dataclass
class PackedRows:
    """Packed rows. Segments number a row's conversations from 1; 0 is padding.

    `sampled` marks the tokens with a loss. `visual` holds m visual tokens per row, each with c
    vectors: one for the embedding layer and one per DeepStack level, in the type of the features.
    The n-th visual token of a row takes its n-th vector. If a part of the vision tower is trained,
    `visual` holds its input instead, and `TrainedVision.encode` the vectors.
    """

    ids: Int[Array, "b t"]
    positions: Int[Array, "3 b t"]
    segments: Int[Array, "b t"]
    sampled: Bool[Array, "b t"]
    visual: Float[Array, "b m c d"] | None = None
    """None until the rows are on the mesh."""
    grids: Int[Array, "b f 2"] | None = None
    """If the whole tower is trained: height and width of each frame, in patches; 0 for none."""


class Rendered(NamedTuple):
    """A conversation as the trainer sees it, with what is cached of its frames.

    The vectors are kept here because a row may have more frames than `FrameFeatures` stores.
    """

    trajectory: Trajectory
    vectors: Float[np.ndarray, "m c d"] | None


def parts_of_rows(shape: PackedShape, devices: int, limit: int) -> int:
    """Number of micro-batches: at most `limit`, and few enough to give each device a row."""
    return min(limit, math.ceil(shape.rows / devices))


def fit_rows(shape: PackedShape, devices: int, microbatches: int = 1) -> PackedShape:
    """Pad rows so that every micro-batch divides evenly over the devices."""
    multiple = devices * microbatches
    return dataclasses.replace(shape, rows=math.ceil(shape.rows / multiple) * multiple)


def fitted_rows(shape: PackedShape, limit: int, mesh: Mesh | None) -> tuple[PackedShape, int]:
    """The shape padded for `mesh`, and the number of micro-batches, at most `limit`."""
    devices = 1 if mesh is None else row_devices(mesh)
    parts = parts_of_rows(shape, devices, limit)
    return fit_rows(shape, devices, parts), parts


def share_of_rows(shape: PackedShape) -> PackedShape:
    """One process's share of a batch whose rows divide evenly over the devices."""
    return dataclasses.replace(shape, rows=shape.rows // jax.process_count())


def render_rows(
    rows: Sequence[Sequence[Conversation]], protocol: Protocol, features: FrameFeatures
) -> tuple[list[list[Rendered]], dict[str, VideoError]]:
    """Render each row's conversations and encode their frames.

    A conversation is missing from its row if one of its files cannot be read, or has changed since
    the data was prepared. Its place becomes padding.

    Returns:
        The rendered conversations of each row, and the errors by the id of the missing ones.
    """
    rendered: list[list[Rendered]] = []
    missing: dict[str, VideoError] = {}
    for row in rows:
        found = []
        for conversation in row:
            try:
                found.append(_render(conversation, protocol, features))
            except VideoError as error:
                missing[conversation.id] = error
        rendered.append(found)
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
    """The largest number of visual tokens in a row, by the sizes that preparation found in files.

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
    """The largest number of frames in a row."""
    return max(sum(len(clip.indices) for chat in row for clip in chat.clips) for row in rows)


def build_packed(
    rows: Sequence[Sequence[Rendered]], features: FrameFeatures, shape: PackedShape
) -> tuple[PackedRows, list[Shaped[np.ndarray, "_ c d"]]]:
    """Lay rendered conversations out as arrays of a static shape.

    Args:
        rows: Rendered conversations, row by row.
        features: Says how many patches a frame has.
        shape: Sizes of the arrays; missing rows become padding.

    Returns:
        NumPy arrays without visual vectors, and what is cached of the frames of each row.

    Raises:
        ValueError: The rows, or a row's tokens or visual tokens, do not fit `shape`.
    """
    config = features.config
    arrays = {
        "ids": np.zeros((shape.rows, shape.tokens), np.int32),
        "positions": np.zeros((3, shape.rows, shape.tokens), np.int32),
        "segments": np.zeros((shape.rows, shape.tokens), np.int32),
        "sampled": np.zeros((shape.rows, shape.tokens), bool),
    }
    none = np.zeros((0, *features.vector), features.dtype)
    visual: list[Any] = [none] * shape.rows
    vision = features.trained
    if vision is not None and vision.whole:
        arrays["grids"] = np.zeros((shape.rows, shape.frames, 2), np.int32)
    _check(len(rows), shape.rows, "rows")
    for r, row in enumerate(rows):
        _check(sum(len(trajectory.ids) for trajectory, _ in row), shape.tokens, "tokens")
        start = 0
        shown = []
        for segment, (trajectory, _) in enumerate(row, 1):
            part = slice(start, start + len(trajectory.ids))
            grids = [features.grid(frame) for frame in trajectory.frames]
            arrays["ids"][r, part] = trajectory.ids
            arrays["segments"][r, part] = segment
            arrays["positions"][:, r, part] = mrope_positions(trajectory.ids, grids, config)
            arrays["sampled"][r, part] = trajectory.authors == Author.MODEL
            shown += grids
            start = part.stop
        cached = [vectors for _, vectors in row if vectors is not None]
        visual[r] = np.concatenate([none, *cached])
        changed = "prepare the data again: files have changed"
        _check(len(visual[r]), shape.visual, "visual", changed)
        if vision is not None and vision.whole:
            _check(len(shown), shape.frames, "frames", changed)
            arrays["grids"][r, : len(shown)] = np.reshape(shown, (-1, 2))
            visual[r] = vision.in_rows(visual[r], shown)
    return PackedRows(**arrays), visual


def _check(
    length: int, limit: int, field: str, remedy: str = "raise sft.row_tokens or sft.rows"
) -> None:
    if length > limit:
        raise ValueError(f"packed.{field}: {length} do not fit the static size {limit}; {remedy}")


def place_packed(
    rows: PackedRows, visual: Sequence[Shaped[np.ndarray, "_ c d"]], room: int, mesh: Mesh
) -> PackedRows:
    """Put this process's share of a batch on the mesh.

    Args:
        rows: Its rows, and
        visual: what is cached of their frames, both from `build_packed`.
        room: Visual tokens per row, padding of frames included.
        mesh: The mesh of training.
    """
    return dataclasses.replace(place(rows, mesh), visual=place_vectors(visual, room, mesh))


def split_microbatches(batch: PackedRows, parts: int) -> PackedRows:
    """Split packed rows into micro-batches of whole rows.

    Every array gets a first axis of length `parts`. Runs inside jitted programs.
    """

    def split(leaf: Array, axis: int) -> Array:
        # [.., parts * n, ..] -> [.., parts, n, ..] -> [parts, .., n, ..]
        before, after = leaf.shape[:axis], leaf.shape[axis + 1 :]
        x = jnp.moveaxis(leaf.reshape(*before, parts, -1, *after), axis, 0)
        # Each device holds consecutive rows, so the first micro-batch would be on the first devices
        # only, and the others would wait. Spread every micro-batch over all devices.
        return constrain(x, *[None] * (axis + 1), ROWS)

    parted: dict[str, Any] = {}
    for field in dataclasses.fields(batch):
        leaf = getattr(batch, field.name)
        parted[field.name] = None if leaf is None else split(leaf, BY_ROW[field.name])
    return PackedRows(**parted)
