"""Frames of a video: which of them to look at, at which size, and what reads them."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int64, UInt8
from PIL import Image


class VideoError(Exception):
    """A video that cannot be read: missing, empty, truncated, without a video stream, or not decodable."""

    def __init__(self, path: str | os.PathLike, reason: str):
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = str(path), reason

    def __reduce__(self):
        return VideoError, (self.path, self.reason)


@dataclasses.dataclass(frozen=True)
class VideoInfo:
    """What is in a file: `times` are timestamps in seconds from the first frame, `duration` ends with the last. Sizes in pixels."""

    path: str
    frames: int
    duration: float
    times: Float64[np.ndarray, " frames"]
    width: int
    height: int


def resize(frame: UInt8[np.ndarray, "h w 3"], size: tuple[int, int]) -> UInt8[np.ndarray, "y x 3"]:
    """The frame at (height, width) pixels, bicubic; the frame itself where it already has that size."""
    if frame.shape[:2] == tuple(size):
        return frame
    return np.asarray(Image.fromarray(frame).resize((size[1], size[0]), Image.Resampling.BICUBIC))


def overview_indices(frames: int, k: int) -> Int64[np.ndarray, " m"]:
    """`k` uniform frame numbers from first to last, as qwen_vl_utils rounds them (float32 linspace, half to even); all once if fewer."""
    if k < 1 or frames < 1:
        raise ValueError(f"overview: {k} of {frames} frames; both need at least 1")
    if frames <= k:
        return np.arange(frames)
    if k == 1:
        return np.zeros(1, np.int64)
    end, i = np.float64(frames - 1), np.arange(k, dtype=np.float64)
    step = np.float64(np.float32(end) / np.float32(k - 1))
    # Products of float32 numbers are exact in float64, so rounding to float32 at the end is the fused multiply-add of torch.linspace.
    points = np.where(i < k // 2, step * i, end - step * (k - 1 - i))
    return np.round(points.astype(np.float32)).astype(np.int64)


def window_indices(
    info: VideoInfo, start: float, end: float, fps: float = 1.0, limit: int = 16
) -> Int64[np.ndarray, " m"]:
    """Frames of the window from `start` up to but not including `end` (seconds), one every 1/fps, or `limit` uniform ones if that is fewer.

    Each wanted time takes the nearest frame of the window, none twice. A window between two frames gets the one on show when it starts.
    """
    if not start < end or fps <= 0 or limit < 1:
        raise ValueError(
            f"window: [{start}, {end}], {fps} fps, at most {limit} frames; give start < end, fps > 0 and limit >= 1"
        )
    tolerance = 1e-6  # seconds, for timestamps such as 0.333333 of a third
    inside = np.flatnonzero((info.times >= start - tolerance) & (info.times < end - tolerance))
    if not inside.size:
        return np.array(
            [max(int(np.searchsorted(info.times, start + tolerance, side="right")) - 1, 0)]
        )
    start = max(start, 0.0)
    span = min(end, info.duration) - start
    count = min(limit, max(1, int(np.ceil(span * fps - tolerance))))
    wanted = start + np.arange(count) * (
        1 / fps if span * fps <= limit + tolerance else span / limit
    )
    times = info.times[inside]
    after = np.searchsorted(times, wanted).clip(max=len(times) - 1)
    before = np.maximum(after - 1, 0)
    return np.unique(
        inside[np.where(wanted - times[before] <= np.abs(times[after] - wanted), before, after)]
    )


@runtime_checkable
class FrameSource(Protocol):
    """Lists and reads videos: `paravt_jax.data.video` itself, or a `FrameReader`."""

    def probe(self, path: pathlib.Path) -> VideoInfo: ...

    def read(self, path: pathlib.Path, indices: list[int]) -> UInt8[np.ndarray, "m h w 3"]: ...
