"""Chooses and resizes the frames of a video; `FrameSource` is the interface of their readers."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int64, UInt8
from PIL import Image

from paravt_jax.processes.exit_codes import UserError


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

        It is that of `qwen_vl_utils.smart_resize`: both sides are multiples of `factor`, the area
        is within the limits, and the aspect ratio stays nearly the same.

        Raises:
            ValueError: One side is over 200 times the other.
        """
        if max(height, width) / min(height, width) > 200:
            raise ValueError(
                f"frame size = {height} x {width}: the longer side may be at most 200 times the "
                "shorter; crop the frame first"
            )
        factor = self.factor
        h = max(factor, round(height / factor) * factor)
        w = max(factor, round(width / factor) * factor)
        if h * w > self.max_pixels:
            beta = math.sqrt(height * width / self.max_pixels)
            h = max(factor, math.floor(height / beta / factor) * factor)
            w = max(factor, math.floor(width / beta / factor) * factor)
        elif h * w < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            h = math.ceil(height * beta / factor) * factor
            w = math.ceil(width * beta / factor) * factor
        return h, w

    def tokens(self, height: int, width: int) -> int:
        """Return the visual tokens of a frame of this size before resizing."""
        height, width = self.size(height, width)
        return height * width // self.factor**2

    @property
    def most_tokens(self) -> int:
        """Upper bound on the visual tokens of a frame, unless it is very long and thin."""
        return max(1, self.max_pixels // self.factor**2)


class VideoError(UserError):
    """A video cannot be read: it is missing, empty, truncated, undecodable or has no pictures."""

    def __init__(self, path: str | os.PathLike, reason: str):
        super().__init__(f"{path}: {reason}")
        self.path = str(path)
        self.reason = reason

    # Worker processes send these errors back. By default an exception is built from its message
    # alone, which this constructor does not accept.
    def __reduce__(self):
        return VideoError, (self.path, self.reason)


@dataclasses.dataclass(frozen=True)
class VideoInfo:
    """What a video file contains.

    Attributes:
        frames: Number of frames.
        duration: Seconds from the start of the first frame to the end of the last.
        times: Timestamp of each frame in seconds, counted from the first frame.
        width: Width of a frame in pixels.
        height: Height of a frame in pixels.
    """

    frames: int
    duration: float
    times: Float64[np.ndarray, " frames"]
    width: int
    height: int


def on_disk(root: str | os.PathLike, name: str) -> pathlib.Path:
    """Return the path of this name below a folder, with accents as the disk writes them.

    macOS writes an accent as a character of its own (NFD), most other systems do not (NFC).
    """
    path = pathlib.Path(root)
    for part in pathlib.PurePath(name).parts:
        forms = (part, *(unicodedata.normalize(form, part) for form in ("NFC", "NFD")))
        path /= next((form for form in forms if os.path.lexists(path / form)), part)
    return path


@functools.lru_cache(maxsize=2**16)
def join(root: str | os.PathLike, name: str) -> pathlib.Path:
    """Return the file of this name below a folder, as `on_disk` finds it.

    Raises:
        VideoError: The name or a link leads out of the folder. Names and folders come from
            strangers.
    """
    folder = pathlib.Path(root)
    path = on_disk(folder, name)
    try:
        target = os.path.realpath(path)
    except ValueError as error:  # the name contains a NUL
        raise VideoError(path, "no such file") from error
    if not is_inside(target, folder):
        raise VideoError(
            path,
            f"it is at {target}, outside {folder}; copy it there (a hard link will do), or give a "
            "folder that holds both",
        )
    return path


def is_inside(target: str | os.PathLike, folder: str | os.PathLike) -> bool:
    """Return whether a path without links lies below a folder.

    A folder of the hub's cache is a snapshot, whose files are links to the blobs of the same data
    set or model: models--NAME/snapshots/REVISION/file -> models--NAME/blobs/HASH.
    """
    home = pathlib.Path(os.path.realpath(folder))
    if home.parent.name == "snapshots":
        home = home.parent.parent
    return pathlib.Path(target).is_relative_to(home)


def resize(frame: UInt8[np.ndarray, "h w 3"], size: tuple[int, int]) -> UInt8[np.ndarray, "y x 3"]:
    """Resize a frame to (height, width) pixels with bicubic filtering.

    A frame that already has this size is returned unchanged.
    """
    if frame.shape[:2] == tuple(size):
        return frame
    height, width = size
    image = Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)


def shown(
    frame: UInt8[np.ndarray, "h w 3"], rules: PixelRules | None
) -> UInt8[np.ndarray, "y x 3"]:
    """Return the pixels that the model sees of a decoded frame. Without rules, the frame itself.

    Raises:
        ValueError: The frame is too long and thin to be resized.
    """
    return frame if rules is None else resize(frame, rules.size(*frame.shape[:2]))


def overview_indices(frames: int, k: int) -> Int64[np.ndarray, " m"]:
    """Choose `k` evenly spaced frame numbers, including the first and the last frame.

    If the video has at most `k` frames, all are chosen. Rounding is exactly that of qwen_vl_utils:
    a float32 linspace, then round half to even.
    """
    if frames <= k:
        return np.arange(frames)
    if k == 1:
        return np.zeros(1, np.int64)
    # torch.linspace computes in float32, with a fused multiply-add and from both ends towards the
    # middle. Products of two float32 numbers are exact in float64, so one rounding to float32 at
    # the end gives the same numbers.
    end = np.float64(frames - 1)
    i = np.arange(k, dtype=np.float64)
    step = np.float64(np.float32(end) / np.float32(k - 1))
    points = np.where(i < k // 2, step * i, end - step * (k - 1 - i))
    return np.round(points.astype(np.float32)).astype(np.int64)


def window_indices(
    info: VideoInfo, start: float, end: float, fps: float = 1.0, limit: int = 16
) -> Int64[np.ndarray, " m"]:
    """Choose the frames that show the window [start, end) of a video.

    Takes the frame nearest to each of several times, without repeating a frame. The times are
    1 / fps apart, or `limit` evenly spaced ones if there would be more. If the window falls between
    two frames, the result is the frame on screen when it starts.

    Args:
        info: The video.
        start: Start of the window in seconds.
        end: End of the window in seconds, exclusive.
        fps: Frames per second to look at.
        limit: Maximum number of frames.

    Raises:
        ValueError: The window is empty.
    """
    if not start < end:
        raise ValueError(f"window: [{start}, {end}]; give start < end")
    # Seconds. A timestamp of 0.333333 still counts as one third.
    tolerance = 1e-6
    inside = np.flatnonzero((info.times >= start - tolerance) & (info.times < end - tolerance))
    if not inside.size:
        started = np.searchsorted(info.times, start + tolerance, side="right")
        return np.array([max(int(started) - 1, 0)])
    start = max(start, 0.0)
    span = min(end, info.duration) - start
    count = min(limit, max(1, int(np.ceil(span * fps - tolerance))))
    spacing = 1 / fps if span * fps <= limit + tolerance else span / limit
    wanted = start + np.arange(count) * spacing
    times = info.times[inside]
    # The nearest frame of each wanted time is one of its two neighbours.
    after = np.searchsorted(times, wanted).clip(max=len(times) - 1)
    before = np.maximum(after - 1, 0)
    earlier_is_nearer = wanted - times[before] <= np.abs(times[after] - wanted)
    return np.unique(inside[np.where(earlier_is_nearer, before, after)])


@dataclasses.dataclass(frozen=True)
class ReadTask:
    """Frames to read from a file: their numbers, or the number of frames of an overview."""

    path: str
    wanted: tuple[int, ...] | int
    rules: PixelRules | None
    """How the frames are resized; None: not at all."""
    whole: int = 0
    """Of a file with at most this many frames, all of them are read in place of an overview."""


@dataclasses.dataclass(frozen=True)
class ReadFrames:
    """What was read of a file."""

    info: VideoInfo
    indices: tuple[int, ...]
    """Frames that were read; none if the task wanted none, or one that does not exist."""
    frames: UInt8[np.ndarray, "m h w 3"]


@runtime_checkable
class FrameSource(Protocol):
    """Reads videos: a `FrameReader`, or in the calling thread `paravt_jax.data.video`."""

    def request(self, task: ReadTask) -> Future[ReadFrames]:
        """Begin to read. The future raises `VideoError` if the file cannot be read."""
        ...

    def ahead(self, task: ReadTask) -> None:
        """Begin to read what `request` will ask for, if other processes read files."""
        ...


def carry_out(
    task: ReadTask,
    probe: Callable[[str], VideoInfo],
    read: Callable[[str, Sequence[int], PixelRules | None], UInt8[np.ndarray, "m h w 3"]],
) -> ReadFrames:
    """List the frames of a file with `probe`, choose those that are wanted, and `read` them.

    Raises:
        VideoError: The file cannot be read.
    """
    info = probe(task.path)
    wanted = task.wanted
    if isinstance(wanted, int):
        whole = info.frames <= task.whole
        wanted = range(info.frames) if whole else overview_indices(info.frames, wanted).tolist()
    if not wanted or not 0 <= min(wanted) <= max(wanted) < info.frames:
        return ReadFrames(info, (), np.zeros((0, 0, 0, 3), np.uint8))
    return ReadFrames(info, tuple(wanted), read(task.path, wanted, task.rules))


def read_now(read: Callable[[], ReadFrames]) -> Future[ReadFrames]:
    """Return a future with the result of `read`, which is called at once."""
    future: Future[ReadFrames] = Future()
    try:
        future.set_result(read())
    except VideoError as error:
        future.set_exception(error)
    return future
