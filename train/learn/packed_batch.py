"""Packed rows into arrays: several conversations in a row, none of which sees another.

Conversations stand one after the other, each a segment with positions of its own, with padding on
the right. A conversation's ids, positions and frames are in a row what they are alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from models.features import FrameFeatures
from models.qwen3_vl.rope import mrope_positions
from models.sharding import row_devices
from paravt_jax.data.frames import VideoError
from paravt_jax.method.conversations import Conversation, render
from paravt_jax.method.protocol import Protocol
from paravt_jax.method.records import Author, Trajectory


@dataclasses.dataclass(frozen=True)
class PackedShape:
    """Rows of a batch, and the tokens and visual tokens that one holds."""

    rows: int
    tokens: int
    visual: int

    def __post_init__(self):
        for name in ("rows", "tokens", "visual"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"PackedShape.{name}: {getattr(self, name)}; give a whole number of at least 1"
                )


@struct.dataclass
class PackedRows:
    """Packed rows. Segments count a row's conversations from 1, 0 is padding; `sampled` tokens are those with loss."""

    ids: Int[np.ndarray, "b t"]
    positions: Int[np.ndarray, "3 b t"]
    segments: Int[np.ndarray, "b t"]
    sampled: Bool[np.ndarray, "b t"]
    visual: Float[np.ndarray, "b m c d"]


class Rendered(NamedTuple):
    """A conversation as the trainer sees it. `vectors` are its frames' as `FrameFeatures` has them: a row may have more than its store
    keeps, so they are asked for once."""

    trajectory: Trajectory
    vectors: Float[np.ndarray, "m c d"] | None


def parts_of_rows(shape: PackedShape, devices: int, most: int) -> int:
    """Number of micro-batches, at most `most` and at most as many as give each device a row."""
    return min(most, -(-shape.rows // devices))


def fit_rows(shape: PackedShape, devices: int, microbatches: int = 1) -> PackedShape:
    """The shape with padding rows, so that each micro-batch lies evenly over `devices` devices."""
    each = devices * microbatches
    return dataclasses.replace(shape, rows=-(-shape.rows // each) * each)


def fitted_rows(shape: PackedShape, most: int, mesh: Mesh | None) -> tuple[PackedShape, int]:
    """`shape` with the padding that the mesh wants, and the number of micro-batches, at most `most`."""
    devices = 1 if mesh is None else row_devices(mesh)
    parts = parts_of_rows(shape, devices, most)
    return fit_rows(shape, devices, parts), parts


def own_rows(shape: PackedShape) -> PackedShape:
    """This process's part of packed rows that lie evenly over the devices."""
    return dataclasses.replace(shape, rows=shape.rows // jax.process_count())


def render_rows(
    rows: Sequence[Sequence[Conversation]], protocol: Protocol, features: FrameFeatures
) -> tuple[list[list[Rendered]], dict[str, VideoError]]:
    """The rows' conversations with their encoded frames, and why those are missing, by id, of which a file could not be read or is not
    what was prepared any more. Their place is padding.
    """
    rendered: list[list[Rendered]] = []
    missing: dict[str, VideoError] = {}
    for row in rows:
        found = []
        for conversation in row:
            try:
                trajectory = render(conversation, protocol, lambda clip: features.tokens(clip.path))
                if conversation.tokens not in (0, len(trajectory.ids)):
                    raise VideoError(
                        conversation.clips[0].path,
                        "its frames have another size than when it was prepared",
                    )
                found.append(
                    Rendered(trajectory, features(trajectory.frames) if trajectory.frames else None)
                )
            except VideoError as error:
                missing[conversation.id] = error
        rendered.append(found)
    return rendered, missing


def build_packed(
    rows: Sequence[Sequence[Rendered]], features: FrameFeatures, shape: PackedShape
) -> PackedRows:
    """Arrays of `rows`; missing rows are padding. Raises ValueError for what does not fit the shape."""
    config = features.config
    batch = PackedRows(
        ids=np.zeros((shape.rows, shape.tokens), np.int32),
        positions=np.zeros((3, shape.rows, shape.tokens), np.int32),
        segments=np.zeros((shape.rows, shape.tokens), np.int32),
        sampled=np.zeros((shape.rows, shape.tokens), bool),
        visual=np.zeros(
            (shape.rows, shape.visual, 1 + config.vision.levels, config.text.hidden_size),
            np.float32,
        ),
    )
    _check(len(rows), shape.rows, "rows")
    for r, row in enumerate(rows):
        _check(sum(len(trajectory.ids) for trajectory, _ in row), shape.tokens, "tokens")
        at = seen = 0
        for segment, (trajectory, vectors) in enumerate(row, 1):
            part = slice(at, at + len(trajectory.ids))
            grids = [features.grid(frame.video) for frame in trajectory.frames]
            batch.ids[r, part], batch.segments[r, part] = trajectory.ids, segment
            batch.positions[:, r, part] = mrope_positions(trajectory.ids, grids, config)
            batch.sampled[r, part] = trajectory.authors == Author.MODEL
            if vectors is not None:
                _check(seen + len(vectors), shape.visual, "visual")
                batch.visual[r, seen : seen + len(vectors)] = vectors
                seen += len(vectors)
            at = part.stop
    return batch


def _check(length: int, limit: int, field: str) -> None:
    if length > limit:
        raise ValueError(
            f"packed.{field}: {length} do not fit the static size {limit}; raise sft.row_tokens or sft.rows"
        )
