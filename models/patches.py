"""Pixels to the patches that the vision tower reads, in NumPy."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8


def patchify(
    frames: UInt8[np.ndarray, "t h w 3"],
    patch: int = 16,
    merge: int = 2,
    temporal: int = 2,
    video: bool = False,
) -> Float[np.ndarray, "m p c"]:
    """Patches of m slices as the tower reads them: values in [-1, 1] (mean and deviation .5), merge order, c = (channel, time, y, x).

    A still is a slice of its own, repeated `temporal` times. Of a `video`, `temporal` neighbours share a slice, and the last frame
    fills up the last one. ValueError where a side is no multiple of patch * merge.
    """
    t, h, w, channels = frames.shape
    if h % (patch * merge) or w % (patch * merge):
        raise ValueError(
            f"frame size = {h} x {w}: both sides are multiples of {patch * merge}; resize to smart_resize's answer first"
        )
    if video:
        frames = np.concatenate([frames, np.repeat(frames[-1:], -t % temporal, axis=0)])
    values = frames.astype(np.float32) / np.float32(127.5) - np.float32(1.0)
    blocks = values.reshape(
        -1,
        temporal if video else 1,
        h // patch // merge,
        merge,
        patch,
        w // patch // merge,
        merge,
        patch,
        channels,
    )
    blocks = blocks.transpose(
        0, 2, 5, 3, 6, 8, 1, 4, 7
    )  # slice, block row, block column, row, column, channel, time, y, x
    blocks = np.repeat(blocks, 1 if video else temporal, axis=6)
    return blocks.reshape(
        len(blocks), (h // patch) * (w // patch), channels * temporal * patch * patch
    )
