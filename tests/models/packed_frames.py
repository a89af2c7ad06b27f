"""The layout of frames of several sizes in one row of the vision tower."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.config import VisionConfig
from models.vision import PatchLayout, frame_layout


def packed_layout(grids: Sequence[tuple[int, int]], size: int, config: VisionConfig) -> PatchLayout:
    """Return the frames of (height, width) patches, then padding."""
    frames = [frame_layout(grid, config) for grid in grids]
    # Padding counts as a frame of one patch, so that nothing divides by 0.
    layout = np.zeros((5, size), np.int32)
    layout[2:4] = 1
    first = 0
    for number, frame in enumerate(frames, 1):
        end = first + frame.y.size
        layout[:4, first:end] = np.concatenate(frame[:4])
        layout[4, first:end] = number
        first = end
    return PatchLayout(*layout[:, None])
