"""Pixels to the patches that the vision tower reads, in NumPy."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8

from models.config import VisionConfig


def patchify(
    frames: UInt8[np.ndarray, "t h w 3"],
    config: VisionConfig,
    video: bool = False,
) -> Float[np.ndarray, "m p c"]:
    """Cuts frames into flattened patches, with the values that a vision tower reads.

    Args:
        frames: RGB pixels.
        config: sizes of the tower's patches, and mean and deviation of its pixels.
        video: whether neighbouring frames share a temporal slice, the last one padded by repeating
            the last frame. Otherwise every frame is a slice of its own, repeated to fill it.

    Returns:
        Patches [m slices, p patches, c], where c runs over (channel, time, y, x). The patches of a
        visual token are neighbours.

    Raises:
        ValueError: a side is no multiple of the side of a visual token.
    """
    patch = config.patch_size
    merge = config.spatial_merge_size
    temporal = config.temporal_patch_size
    t, h, w, channels = frames.shape
    if h % (patch * merge) or w % (patch * merge):
        raise ValueError(
            f"frame size = {h} x {w}: both sides are multiples of {patch * merge}; resize frames "
            "to the size that smart_resize gives"
        )
    if video:
        frames = np.concatenate([frames, np.repeat(frames[-1:], -t % temporal, axis=0)])
    mean = np.asarray(config.pixel_mean, np.float32)
    std = np.asarray(config.pixel_std, np.float32)
    values = frames.astype(np.float32) / (255 * std) - mean / std
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
