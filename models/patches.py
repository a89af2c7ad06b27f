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
    """Cuts frames into flattened patches with values in [-1, 1].

    Args:
        frames: RGB pixels.
        patch: side of a patch, in pixels.
        merge: visual tokens are made of merge x merge patches; a token's patches are neighbours.
        temporal: frames per temporal slice.
        video: whether neighbouring frames share a slice, the last one padded by repeating the last
            frame. Otherwise every frame is a slice of its own, repeated `temporal` times.

    Returns:
        Patches [m slices, p patches, c], where c runs over (channel, time, y, x).

    Raises:
        ValueError: a side is no multiple of patch * merge.
    """
    t, h, w, channels = frames.shape
    if h % (patch * merge) or w % (patch * merge):
        raise ValueError(
            f"frame size = {h} x {w}: both sides are multiples of {patch * merge}; resize frames "
            "to the size that smart_resize gives"
        )
    if video:
        frames = np.concatenate([frames, np.repeat(frames[-1:], -t % temporal, axis=0)])
    # Mean 0.5 and deviation 0.5 per channel.
    values = frames.astype(np.float32) / np.float32(127.5) - np.float32(1.0)
    # Height splits into (block row, row in the block, y), and width likewise.
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
    # -> slice, block row, block column, row, column, channel, time, y, x
    blocks = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    blocks = np.repeat(blocks, 1 if video else temporal, axis=6)
    patches = (h // patch) * (w // patch)
    return blocks.reshape(len(blocks), patches, channels * temporal * patch * patch)
