"""Frames to patches, in NumPy: the size a frame is shown at, the resize, and the order of patches that the vision tower reads.

Owns pixels between decoding and the model; opens no files. Invariant: patches depend on their own frame alone, so they may be cached.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

_MIN_TOKENS, _MAX_TOKENS = 4, 16_384  # visual tokens an image has at least and at most where the caller sets no limits


def smart_resize(
    height: int, width: int, min_pixels: int | None = None, max_pixels: int | None = None, factor: int = 32
) -> tuple[int, int]:
    """The (height, width) a frame is shown at: multiples of `factor`, area within [min_pixels, max_pixels], shape nearly kept.

    Follows `qwen_vl_utils.smart_resize`; `factor` is patch size x merge size. ValueError for a side below 1, a ratio above 200 or
    crossed limits.
    """
    min_pixels = _MIN_TOKENS * factor**2 if min_pixels is None else min_pixels
    max_pixels = _MAX_TOKENS * factor**2 if max_pixels is None else max_pixels
    if min(height, width) < 1:
        raise ValueError(f"frame size = {height} x {width}: both sides are at least 1 pixel; check the decoder")
    if max_pixels < min_pixels:
        raise ValueError(f"max_pixels = {max_pixels}: at least min_pixels = {min_pixels}; raise one or lower the other")
    if max(height, width) / min(height, width) > 200:
        raise ValueError(f"frame size = {height} x {width}: the longer side is at most 200 times the shorter; crop the frame first")
    h, w = (max(factor, round(side / factor) * factor) for side in (height, width))
    if h * w > max_pixels:
        beta = math.sqrt(height * width / max_pixels)
        h, w = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
    elif h * w < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        h, w = (math.ceil(side * beta / factor) * factor for side in (height, width))
    return h, w


def resize(frame: UInt8[np.ndarray, "h w 3"], size: tuple[int, int]) -> UInt8[np.ndarray, "y x 3"]:
    """The frame at (height, width) pixels, bicubic; the frame itself where it already has that size."""
    if frame.shape[:2] == tuple(size):
        return frame
    return np.asarray(Image.fromarray(frame).resize((size[1], size[0]), Image.Resampling.BICUBIC))


def patchify(frames: UInt8[np.ndarray, "m h w 3"], patch: int = 16, merge: int = 2, temporal: int = 2) -> Float[np.ndarray, "m p c"]:
    """Patches of m frames as the tower reads them: values in [-1, 1] (mean and deviation .5), merge order, c = (channel, time, y, x).

    Each frame stands for itself: it is repeated `temporal` times. ValueError where a side is no multiple of patch * merge.
    """
    m, h, w, channels = frames.shape
    if h % (patch * merge) or w % (patch * merge):
        raise ValueError(f"frame size = {h} x {w}: both sides are multiples of {patch * merge}; resize to smart_resize's answer first")
    values = frames.astype(np.float32) / np.float32(127.5) - np.float32(1.0)
    blocks = values.reshape(m, h // patch // merge, merge, patch, w // patch // merge, merge, patch, channels)
    blocks = blocks.transpose(0, 1, 4, 2, 5, 7, 3, 6)  # frame, block row, block column, row, column, channel, y, x
    blocks = np.repeat(blocks[:, :, :, :, :, :, None], temporal, axis=6)
    return blocks.reshape(m, (h // patch) * (w // patch), channels * temporal * patch * patch)
