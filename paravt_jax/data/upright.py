"""Turns and mirrors decoded frames as players do. Decoders return them as they are stored."""

from __future__ import annotations

import math
import os

import av
import numpy as np
from jaxtyping import UInt8

from paravt_jax.data.frames import VideoError

# Largest difference from a quarter turn, in degrees. FFmpeg's tolerance.
_TOLERANCE = 1.0


def upright(path: str | os.PathLike, frame: av.VideoFrame) -> UInt8[np.ndarray, "height width 3"]:
    """Return the RGB pixels of a frame as a player shows them.

    The frame's display matrix (a, b, u, c, d, v, x, y, w) moves the pixel at (x, y) to
    (a x + c y, b x + d y), in the notation of QuickTime's file format.

    Raises:
        VideoError: The matrix turns the frame by another angle than a quarter turn.
    """
    pixels = frame.to_ndarray(format="rgb24", threads=1)
    a, b, c, d = _matrix(frame)
    if _is_transposed(path, frame):
        pixels = pixels.transpose(1, 0, 2)
        flip_columns, flip_rows = c < 0, b < 0
    else:
        flip_columns, flip_rows = a < 0, d < 0
    if flip_columns:
        pixels = pixels[:, ::-1]
    if flip_rows:
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def shown_size(path: str | os.PathLike, frame: av.VideoFrame) -> tuple[int, int]:
    """Return the width and height of a frame as a player shows it, in pixels.

    Raises:
        VideoError: As in `upright`.
    """
    if _is_transposed(path, frame):
        return frame.height, frame.width
    return frame.width, frame.height


def is_mirrored(frame: av.VideoFrame) -> bool:
    """Return whether a player mirrors a frame. decord turns frames, but never mirrors them."""
    a, b, c, d = _matrix(frame)
    return a * d - b * c < 0


def _is_transposed(path: str | os.PathLike, frame: av.VideoFrame) -> bool:
    """Return whether a player exchanges the rows and columns of a frame."""
    a, b, c, d = _matrix(frame)
    angle = math.degrees(math.atan2(math.hypot(b, c), math.hypot(a, d)))
    if _TOLERANCE < angle < 90 - _TOLERANCE:
        raise VideoError(
            path,
            f"it is to be shown turned by {math.degrees(math.atan2(b, a)):.0f} degrees, and only "
            "quarter turns are read; encode it upright (ffmpeg -i OLD NEW.mp4)",
        )
    return angle > 45


def _matrix(frame: av.VideoFrame) -> tuple[int, int, int, int]:
    """Return a, b, c and d of the display matrix, or those of the identity if there is none."""
    found = frame.side_data.get("DISPLAYMATRIX")
    if found is None:
        return 1, 0, 0, 1
    a, b, _, c, d, *_ = np.frombuffer(bytes(found), "<i4").tolist()
    # Some recorders write zeros, which players take for the identity.
    return (a, b, c, d) if a * d - b * c else (1, 0, 0, 1)
