"""Turns and mirrors decoded frames as players do. Decoders return them as they are stored."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import av
import numpy as np
from jaxtyping import UInt8

from paravt_jax.data.frames import VideoError

# Largest difference from a quarter turn, in degrees. FFmpeg's tolerance.
_TOLERANCE = 1.0


class Orientation(NamedTuple):
    """How a stored frame becomes the shown one: rows and columns are exchanged, then reversed."""

    exchange: bool = False
    reverse_columns: bool = False
    reverse_rows: bool = False


def orientation_of(
    path: str | os.PathLike, frame: av.VideoFrame
) -> tuple[Orientation, tuple[int, int]]:
    """Return how a player turns a frame, and the width and height at which it shows it.

    The frame's display matrix (a, b, u, c, d, v, x, y, w) moves the pixel at (x, y) to
    (a x + c y, b x + d y), in the notation of QuickTime's file format.

    Raises:
        VideoError: The matrix turns the frame by another angle than a quarter turn.
    """
    a, b, c, d = _matrix(frame)
    angle = math.degrees(math.atan2(math.hypot(b, c), math.hypot(a, d)))
    if _TOLERANCE < angle < 90 - _TOLERANCE:
        raise VideoError(
            path,
            f"it is to be shown turned by {math.degrees(math.atan2(b, a)):.0f} degrees, and only "
            "quarter turns are read; encode it upright (ffmpeg -i OLD NEW.mp4)",
        )
    if angle > 45:
        return Orientation(True, c < 0, b < 0), (frame.height, frame.width)
    return Orientation(False, a < 0, d < 0), (frame.width, frame.height)


def upright(frame: av.VideoFrame, orientation: Orientation) -> UInt8[np.ndarray, "height width 3"]:
    """Return the RGB pixels of a frame as a player shows them."""
    pixels = frame.to_ndarray(format="rgb24", threads=1)
    if orientation.exchange:
        pixels = pixels.transpose(1, 0, 2)
    if orientation.reverse_columns:
        pixels = pixels[:, ::-1]
    if orientation.reverse_rows:
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _matrix(frame: av.VideoFrame) -> tuple[int, int, int, int]:
    """Return a, b, c and d of the display matrix, or those of the identity if there is none."""
    found = frame.side_data.get("DISPLAYMATRIX")
    if found is None:
        return 1, 0, 0, 1
    a, b, _, c, d, *_ = np.frombuffer(bytes(found), "<i4").tolist()
    # Some recorders write zeros, which players take for the identity.
    return (a, b, c, d) if a * d - b * c else (1, 0, 0, 1)
