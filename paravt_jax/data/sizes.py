"""Computes the sizes at which the model sees pictures: multiples of a patch, of limited area.

The results equal those of qwen_vl_utils and of the processors of transformers.
"""

from __future__ import annotations

import dataclasses
import math

# Default limits on the visual tokens of an image.
_MIN_TOKENS = 4
_MAX_TOKENS = 16_384


@dataclasses.dataclass(frozen=True)
class PixelRules:
    """How a decoded frame is resized to the pixels that the model sees."""

    min_pixels: int = 784
    """Smaller frames are enlarged to this area, in pixels."""
    max_pixels: int = 50_176
    """Larger frames are shrunk to this area, in pixels."""
    factor: int = 32
    """Pixels along the side of a merged patch: patch size times merge size."""

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) at which the model sees a frame of this size.

        Raises:
            ValueError: As in `smart_resize`.
        """
        return smart_resize(height, width, self.min_pixels, self.max_pixels, self.factor)

    def tokens(self, height: int, width: int) -> int:
        """Return the visual tokens of a frame of this size before resizing."""
        height, width = self.size(height, width)
        return height * width // self.factor**2

    @property
    def most_tokens(self) -> int:
        """Upper bound on the visual tokens of a frame, unless it is very long and thin."""
        return max(1, self.max_pixels // self.factor**2)


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
    return fit_size(height, width, (min_pixels, max_pixels), factor, least_side=factor)


def fit_size(
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
