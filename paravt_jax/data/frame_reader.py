"""Frames read ahead of need: other processes open, decode and shrink them while the accelerator computes.

Owns what is on its way and what has come. Refuses to wait for ever: a file that takes longer than its deadline, or that takes its process
with it, is a `VideoError` like any other bad file. Invariant: pixels are those of `video.read` and `resize`, whether they were asked for
ahead or not.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from jaxtyping import Int64, UInt8

from paravt_jax.data import video
from paravt_jax.data.frames import VideoError, VideoInfo, overview_indices, resize
from paravt_jax.data.sizes import smart_resize
from paravt_jax.data.workers import WorkerError, Workers


@dataclasses.dataclass(frozen=True)
class ReaderSettings:
    """Processes that read, the seconds a file may take, the files that are kept ready (64 frames of 224 x 224 are 9.2 MiB), and a frame's
    limits in pixels and merged patch.
    """

    workers: int = 8
    deadline: float = 60.0
    ready: int = 256
    min_pixels: int = 784
    max_pixels: int = 50_176
    factor: int = 32

    def __post_init__(self):
        for name in ("workers", "ready"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"reader.{name}: {getattr(self, name)}; give a whole number of at least 1"
                )
        if not self.deadline > 0:
            raise ValueError(f"reader.deadline: {self.deadline}; give seconds, more than 0")


@dataclasses.dataclass(frozen=True)
class _Task:
    """A file, and its frames by number, or how many of its overview."""

    path: str
    wanted: tuple[int, ...] | int
    settings: ReaderSettings


@dataclasses.dataclass(frozen=True)
class _Found:
    info: VideoInfo
    indices: tuple[int, ...]
    frames: np.ndarray


class FrameReader:
    """Reads frames in other processes, at the size they are shown at. `ahead` asks for them; `read` and `probe` wait for what was asked.

    Use it in a `with` block, or `close` it.
    """

    def __init__(self, settings: ReaderSettings):
        self.settings = settings
        self._workers: Workers[_Task, _Found] = Workers(_read, settings.workers, settings.deadline)
        self._asked: collections.OrderedDict[str, list[Future[_Found]]] = collections.OrderedDict()
        self._lock = threading.Lock()
        self.frames = 0  # that were read
        self.late = 0  # reads that nobody had asked for ahead

    def ahead(
        self, path: str | os.PathLike, wanted: Sequence[int] | Int64[np.ndarray, " m"] | int
    ) -> None:
        """Begins to read frames of a file by number, or that many of its overview; at once, and without a word on whether it can."""
        wanted = wanted if isinstance(wanted, int) else tuple(int(n) for n in wanted)
        with self._lock:
            self._ask(str(path), wanted)

    def probe(self, path: str | os.PathLike) -> VideoInfo:
        """As `video.probe`. Raises VideoError."""
        with self._lock:
            futures = list(self._asked.get(str(path), ()))
        for future in futures:
            with contextlib.suppress(
                IndexError
            ):  # who asks for frames that are not there is told so by `read`
                return _result(str(path), future).info
        return _result(str(path), self._late(str(path), ())).info

    def read(
        self, path: str | os.PathLike, indices: Sequence[int] | Int64[np.ndarray, " m"]
    ) -> UInt8[np.ndarray, "m h w 3"]:
        """As `video.read`, but at the size that frames are shown at. What was asked for ahead is given once, then forgotten."""
        wanted = [int(n) for n in indices]
        with self._lock:
            futures = self._asked.pop(str(path), [])
        for future in list(futures):
            try:
                found = _result(str(path), future)
            except (
                IndexError
            ):  # somebody's frames are not there; a late reading says whether these are
                futures.remove(future)
                continue
            if set(wanted) <= set(found.indices):
                futures.remove(future)
                with self._lock:
                    if futures:  # what others want of the same file
                        self._asked[str(path)] = futures + self._asked.get(str(path), [])
                return self._take(found, wanted)
        return self._take(_result(str(path), self._late(str(path), tuple(wanted))), wanted)

    def forget(self) -> None:
        """Drops all that was asked for: what was to come next has changed."""
        with self._lock:
            for futures in self._asked.values():
                for future in futures:
                    future.cancel()
            self._asked.clear()

    def close(self) -> None:
        self.forget()
        self._workers.close()

    def __enter__(self) -> FrameReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, path: str, wanted: tuple[int, ...] | int) -> Future[_Found]:
        future = self._workers.submit(_Task(path, wanted, self.settings))
        self._asked.setdefault(path, []).append(future)
        while (
            sum(map(len, self._asked.values())) > self.settings.ready
        ):  # nobody came for the oldest
            self._asked.popitem(last=False)
        return future

    def _late(self, path: str, wanted: tuple[int, ...]) -> Future[_Found]:
        self.late += 1
        return self._workers.submit(_Task(path, wanted, self.settings))

    def _take(self, found: _Found, wanted: Sequence[int]) -> np.ndarray:
        self.frames += len(wanted)
        if list(found.indices) == list(wanted):
            return found.frames
        return found.frames[[found.indices.index(n) for n in wanted]]


def _result(path: str, future: Future[_Found]) -> _Found:
    try:
        return future.result()
    except WorkerError as error:
        raise VideoError(path, str(error)) from error


def _read(task: _Task) -> _Found:
    """A worker's whole job. No frames are read where none are wanted."""
    info = video.probe(task.path)
    wanted = task.wanted
    indices = (
        tuple(overview_indices(info.frames, wanted).tolist()) if isinstance(wanted, int) else wanted
    )
    if not indices:
        return _Found(info, (), np.zeros((0, 0, 0, 3), np.uint8))
    settings = task.settings
    try:
        limits = settings.min_pixels, settings.max_pixels
        size = smart_resize(info.height, info.width, *limits, settings.factor)
    except ValueError as error:  # its frames are too long and thin to be shown
        raise VideoError(task.path, str(error)) from error
    return _Found(
        info,
        indices,
        np.stack([resize(frame, size) for frame in video.read(task.path, indices)]),
    )
