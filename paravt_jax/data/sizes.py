"""Computes the sizes at which the model sees pictures: multiples of a patch, of limited area.

The results equal those of qwen_vl_utils and of the processors of transformers.
"""

from __future__ import annotations

import math

# Default limits on the visual tokens of an image.
_MIN_TOKENS = 4
_MAX_TOKENS = 16_384


def smart_resize(
    height: int,
    width: int,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    factor: int = 32,
) -> tuple[int, int]:
    """Return the (height, width) at which a frame is shown, as `qwen_vl_utils.smart_resize` does.

    Both sides are multiples of `factor`, the area is within the limits, and the aspect ratio stays
    nearly the same.

    Args:
        height: Height of the frame in pixels.
        width: Width of the frame in pixels.
        min_pixels: Smallest area in pixels; 4 visual tokens by default.
        max_pixels: Largest area in pixels; 16,384 visual tokens by default.
        factor: Pixels along the side of a merged patch: patch size times merge size.

    Raises:
        ValueError: A side is below 1, one side is over 200 times the other, or `min_pixels` exceeds
            `max_pixels`.
    """
    if min_pixels is None:
        min_pixels = _MIN_TOKENS * factor**2
    if max_pixels is None:
        max_pixels = _MAX_TOKENS * factor**2
    return _fit(height, width, (min_pixels, max_pixels), factor, least_side=factor)


def image_size(
    height: int, width: int, limits: tuple[int, int], factor: int = 32
) -> tuple[int, int]:
    """Return the (height, width) at which transformers' image processor shows an image.

    The result differs from `smart_resize` only if a side is below factor / 2. That side is rounded
    to 0, so the area is 0 and the image is always enlarged.

    Args:
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        limits: Smallest and largest area in pixels.
        factor: Pixels along the side of a merged patch.

    Raises:
        ValueError: As in `smart_resize`.
    """
    return _fit(height, width, limits, factor, least_side=0)


def video_size(
    frames: int,
    height: int,
    width: int,
    limits: tuple[int, int],
    factor: int = 32,
    temporal: int = 2,
) -> tuple[int, int]:
    """Return the (height, width) at which transformers' video processor shows the frames.

    Args:
        frames: Number of frames.
        height: Height of a frame in pixels.
        width: Width of a frame in pixels.
        limits: Smallest and largest number of pixels of all frames together.
        factor: Pixels along the side of a merged patch. A smaller side is first enlarged to it.
        temporal: Frames per temporal patch.

    Raises:
        ValueError: There are fewer than `temporal` frames, or as in `smart_resize`.
    """
    if frames < temporal:
        raise ValueError(
            f"video: {frames} frames; give at least {temporal}, or a single frame as an image"
        )
    if 0 < min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height = int(height * scale)
        width = int(width * scale)
    # transformers rounds the number of frames to whole temporal patches when it compares with the
    # limits, but scales by the exact number.
    rounded = round(frames / temporal) * temporal
    return _fit(height, width, limits, factor, least_side=0, frames=frames, compared_frames=rounded)


def _fit(
    height: int,
    width: int,
    limits: tuple[int, int],
    factor: int,
    least_side: int,
    frames: int = 1,
    compared_frames: int = 1,
) -> tuple[int, int]:
    """Round both sides to multiples of `factor`, and rescale if the area is outside the limits.

    `compared_frames` enters the comparison with the limits, and `frames` the scale.
    """
    min_pixels, max_pixels = limits
    if min(height, width) < 1:
        raise ValueError(
            f"frame size = {height} x {width}: both sides need at least 1 pixel; check the decoder"
        )
    if max_pixels < min_pixels:
        raise ValueError(
            f"max_pixels = {max_pixels}: below min_pixels = {min_pixels}; "
            "raise one or lower the other"
        )
    if max(height, width) / min(height, width) > 200:
        raise ValueError(
            f"frame size = {height} x {width}: the longer side may be at most 200 times the "
            "shorter; crop the frame first"
        )
    h = max(least_side, round(height / factor) * factor)
    w = max(least_side, round(width / factor) * factor)
    if compared_frames * h * w > max_pixels:
        beta = math.sqrt(frames * height * width / max_pixels)
        h = max(factor, math.floor(height / beta / factor) * factor)
        w = max(factor, math.floor(width / beta / factor) * factor)
    elif compared_frames * h * w < min_pixels:
        beta = math.sqrt(min_pixels / (frames * height * width))
        h = math.ceil(height * beta / factor) * factor
        w = math.ceil(width * beta / factor) * factor
    return h, w
