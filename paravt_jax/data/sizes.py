"""Computes the sizes at which the model sees pictures: multiples of a patch, of limited area.

The results equal those of qwen_vl_utils and of the processors of transformers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Protocol, runtime_checkable

# Default limits on the visual tokens of an image.
_MIN_TOKENS = 4
_MAX_TOKENS = 16_384

# `PixelRules.most_tokens` covers frames whose longer side is at most this many times the shorter.
_MOST_ELONGATED = 4


@runtime_checkable
class FrameRules(Protocol):
    """How frames are resized: `PixelRules`, or those of a native video. They can be hashed."""

    @property
    def factor(self) -> int: ...

    @property
    def jpeg(self) -> int: ...

    @property
    def most_tokens(self) -> int: ...

    def sizes(self, height: int, width: int) -> tuple[tuple[int, int], ...]: ...


@dataclasses.dataclass(frozen=True)
class PixelRules:
    """How a decoded frame becomes the pixels that the model sees.

    By default a frame is resized once, to a multiple of `factor` within the limits. A server that
    gets frames as pictures works in several steps, which `snap`, `jpeg` and `processor_min_pixels`
    repeat:

        decoded frame     720 x 1280
        client's size     560 x 1008     multiples of `snap`, at most `max_pixels`
        JPEG              560 x 1008     with `jpeg`
        processor's size  576 x 1024     multiples of `factor`, at least `processor_min_pixels`
    """

    min_pixels: int = 784
    """Smaller frames are enlarged to this area, in pixels."""
    max_pixels: int = 50_176
    """Larger frames are shrunk to this area, in pixels."""
    factor: int = 32
    """Pixels along the side of a merged patch: patch size times merge size."""
    snap: int = 0
    """Sides are first rounded to multiples of this many pixels; 0 leaves the step out."""
    jpeg: int = 0
    """Quality of the JPEG through which the resized frame goes; 0 leaves the step out."""
    processor_min_pixels: int = 0
    """Smallest area that the processor accepts, in pixels; 0: any."""

    def sizes(self, height: int, width: int) -> tuple[tuple[int, int], ...]:
        """The (height, width) of each step at which a frame is resized; the last is the model's.

        Raises:
            ValueError: As in `smart_resize`.
        """
        limits = (self.min_pixels, self.max_pixels)
        if not self.snap and not self.processor_min_pixels:
            return (smart_resize(height, width, *limits, self.factor),)
        first = smart_resize(height, width, *limits, self.snap or self.factor)
        return first, self._processor_size(first)

    def tokens(self, height: int, width: int) -> int:
        """Visual tokens of a frame of this size before resizing."""
        height, width = self.sizes(height, width)[-1]
        return height * width // self.factor**2

    @property
    def most_tokens(self) -> int:
        """Upper bound on the visual tokens of a frame that is at most 4 times as long as wide."""
        if not self.snap and not self.processor_min_pixels:
            return max(1, self.max_pixels // self.factor**2)
        return _most_tokens(self)

    def _processor_size(self, size: tuple[int, int]) -> tuple[int, int]:
        least = self.processor_min_pixels or 1
        return image_size(*size, (least, _MAX_TOKENS * self.factor**2), self.factor)


@functools.lru_cache
def _most_tokens(rules: PixelRules) -> int:
    """The largest processor's size of all sizes that the first step can give, in tokens."""
    step = rules.snap or rules.factor
    cells = max(1, rules.max_pixels // step**2)
    areas = []
    for rows in range(1, cells + 1):
        for columns in range(rows, min(cells // rows, _MOST_ELONGATED * rows) + 1):
            # The rule treats both sides alike.
            height, width = rules._processor_size((rows * step, columns * step))
            areas.append(height * width)
    return max(areas) // rules.factor**2


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
    return _fit(height, width, limits, factor, least_side=0, frames=(frames, rounded))


def _fit(
    height: int,
    width: int,
    limits: tuple[int, int],
    factor: int,
    least_side: int,
    frames: tuple[int, int] = (1, 1),
) -> tuple[int, int]:
    """Round both sides to multiples of `factor`, and rescale if the area is outside the limits.

    `frames` are the number of frames for the scale, and that for the comparison with the limits.
    """
    scaled_frames, compared_frames = frames
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
        beta = math.sqrt(scaled_frames * height * width / max_pixels)
        h = max(factor, math.floor(height / beta / factor) * factor)
        w = max(factor, math.floor(width / beta / factor) * factor)
    elif compared_frames * h * w < min_pixels:
        beta = math.sqrt(min_pixels / (scaled_frames * height * width))
        h = math.ceil(height * beta / factor) * factor
        w = math.ceil(width * beta / factor) * factor
    return h, w
