"""Frames of images and videos packed into rows of the vision tower, whatever their sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from models.config import VisionConfig
from models.vision import PatchLayout, frame_layout


def packed_layout(
    grids: Sequence[tuple[int, int, int]], size: int, config: VisionConfig
) -> PatchLayout:
    """Return the layout of one row: the frames of images and videos, one after another, then
    padding.

    The row's visual tokens come in the same order.

    Args:
        grids: (frames, height, width) of each image and video, in patches. An image has one frame.
        size: length of the row, in patches.
        config: for the merge size.

    Raises:
        ValueError: a side is not a multiple of the merge size, or `size` is too small or not a
            multiple of its square.
    """
    merge = config.spatial_merge_size
    filled = sum(t * h * w for t, h, w in grids)
    frames = [frame_layout((h, w), config) for t, h, w in grids for _ in range(t)]
    if filled > size or size % merge**2:
        raise ValueError(
            f"size = {size}: holds all {filled} patches and is a multiple of {merge**2}; choose a "
            "larger bucket"
        )
    # The five fields of `PatchLayout`.
    layout = np.zeros((5, size), np.int32)
    # Padding counts as a frame of one patch, so that nothing divides by 0.
    layout[2:4] = 1
    first = 0
    for number, frame in enumerate(frames, 1):
        last = first + frame.row.size
        layout[:4, first:last] = np.concatenate(frame[:4])
        layout[4, first:last] = number
        first = last
    return PatchLayout(*layout[:, None])


class PackedPatches(NamedTuple):
    """Patches packed into rows."""

    patches: Float[np.ndarray, "b p c"]
    layout: PatchLayout
    # For each visual token, its number among the tower's outputs [b, q], flattened.
    tokens: Int[np.ndarray, " n"]


def deal_rows(grids: Sequence[tuple[int, int, int]], size: int) -> list[list[tuple[int, int, int]]]:
    """Distribute frames over as few rows of `size` patches as possible, in order.

    Frames stay whole. There is at least one row.
    """
    rows = [[]]
    room = size
    for frame in [(1, h, w) for t, h, w in grids for _ in range(t)]:
        area = math.prod(frame)
        if area > room and rows[-1]:
            rows.append([])
            room = size
        rows[-1].append(frame)
        room -= area
    return rows


def pack_patches(
    patches: Float[np.ndarray, "n c"],
    grids: Sequence[tuple[int, int, int]],
    size: int,
    config: VisionConfig,
    rows: int | None = None,
) -> PackedPatches:
    """Pack the frames of images and videos into rows of `size` patches.

    Args:
        patches: patches of all images and videos, as in `Inputs`.
        grids: (frames, height, width) of each, in patches.
        size: length of a row, in patches. The cost of attention per patch grows with `size`, so
            with many frames the size of the largest frame is best.
        config: for the merge size.
        rows: number of rows, the last ones padding; None: as few as the frames need.

    Raises:
        ValueError: a frame is larger than `size`, the frames need more than `rows` rows, or patches
            and grids disagree.
    """
    if sum(map(math.prod, grids)) != len(patches):
        raise ValueError(
            f"grids = {list(grids)}: {len(patches)} patches do not fill them; give patches and "
            "grids of the same sample"
        )
    dealt = deal_rows(grids, size)
    if rows is not None and len(dealt) > rows:
        raise ValueError(
            f"rows = {rows}: the frames need {len(dealt)} rows of {size} patches; give more rows, "
            "or larger ones"
        )
    dealt += [[]] * ((rows or 0) - len(dealt))
    layouts = [packed_layout(row, size, config) for row in dealt]
    layout = jax.tree.map(lambda *parts: np.concatenate(parts), *layouts)
    slots = np.flatnonzero(layout.frame)
    filled = np.zeros((len(dealt) * size, patches.shape[1]), patches.dtype)
    filled[slots] = patches
    # merge^2 neighbouring patches become one visual token.
    merged = config.spatial_merge_size**2
    return PackedPatches(filled.reshape(len(dealt), size, -1), layout, slots[::merged] // merged)
