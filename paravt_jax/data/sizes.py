"""The sizes at which pictures are shown: multiples of a patch, within limits on their area.

Owns the arithmetic of sizes and no pixels. Invariant: the sizes are those of qwen_vl_utils and of the processors of transformers.
"""

from __future__ import annotations

import math

_MIN_TOKENS, _MAX_TOKENS = (
    4,
    16_384,
)  # visual tokens an image has at least and at most where the caller sets no limits


def smart_resize(
    height: int,
    width: int,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    factor: int = 32,
) -> tuple[int, int]:
    """The (height, width) a frame is shown at: multiples of `factor`, area within [min_pixels, max_pixels], shape nearly kept.

    Follows `qwen_vl_utils.smart_resize`; `factor` is patch size x merge size. ValueError for a side below 1, a ratio above 200 or
    crossed limits.
    """
    min_pixels = _MIN_TOKENS * factor**2 if min_pixels is None else min_pixels
    max_pixels = _MAX_TOKENS * factor**2 if max_pixels is None else max_pixels
    return _fit(height, width, (min_pixels, max_pixels), factor, least=factor)


def image_size(
    height: int, width: int, limits: tuple[int, int], factor: int = 32
) -> tuple[int, int]:
    """The (height, width) the image processor of transformers shows an image at; `limits` on the area in pixels. Refuses as `smart_resize`.

    Equal to `smart_resize` but where a side is below factor / 2: it counts as nothing, so the image is always enlarged.
    """
    return _fit(height, width, limits, factor, least=0)


def video_size(
    frames: int,
    height: int,
    width: int,
    limits: tuple[int, int],
    factor: int = 32,
    temporal: int = 2,
) -> tuple[int, int]:
    """The (height, width) the video processor of transformers shows frames at; `limits` on the pixels of all frames together.

    A side below `factor` is enlarged first. ValueError for fewer than `temporal` frames, and as `smart_resize`.
    """
    if frames < temporal:
        raise ValueError(
            f"video: {frames} frames, at least {temporal}; give a single frame as an image"
        )
    if 0 < min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    return _fit(
        height,
        width,
        limits,
        factor,
        least=0,
        frames=frames,
        counted=round(frames / temporal) * temporal,
    )


def _fit(
    height: int,
    width: int,
    limits: tuple[int, int],
    factor: int,
    least: int,
    frames: int = 1,
    counted: int = 1,
) -> tuple[int, int]:
    """Sides rounded to multiples of `factor`, or scaled so that `frames` of them keep the limits that `counted` of them break."""
    min_pixels, max_pixels = limits
    if min(height, width) < 1:
        raise ValueError(
            f"frame size = {height} x {width}: both sides are at least 1 pixel; check the decoder"
        )
    if max_pixels < min_pixels:
        raise ValueError(
            f"max_pixels = {max_pixels}: at least min_pixels = {min_pixels}; raise one or lower the other"
        )
    if max(height, width) / min(height, width) > 200:
        raise ValueError(
            f"frame size = {height} x {width}: the longer side is at most 200 times the shorter; crop the frame first"
        )
    h, w = (max(least, round(side / factor) * factor) for side in (height, width))
    if counted * h * w > max_pixels:
        beta = math.sqrt(frames * height * width / max_pixels)
        h, w = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
    elif counted * h * w < min_pixels:
        beta = math.sqrt(min_pixels / (frames * height * width))
        h, w = (math.ceil(side * beta / factor) * factor for side in (height, width))
    return h, w
