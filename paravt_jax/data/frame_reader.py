"""Reads frames ahead of time: worker processes decode and resize them during training steps.

The pixels are those of `video.read`, whether or not they were requested ahead.
A file that hangs or crashes its worker raises `VideoError`, like any other bad file.
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
from paravt_jax.data.frames import VideoError, VideoInfo, overview_indices
from paravt_jax.data.sizes import FrameRules, PixelRules
from paravt_jax.data.workers import WorkerError, Workers


@dataclasses.dataclass(frozen=True)
class ReaderSettings:
    """Worker processes, time limit and frame sizes of a `FrameReader`."""

    workers: int = 8
    """Number of worker processes."""
    deadline: float = 60.0
    """Time limit for reading one file, in seconds."""
    ready: int = 256
    """Upper bound on requests kept in memory; one for 64 frames of 224 x 224 takes 9.2 MiB."""
    rules: PixelRules = PixelRules()
    """How frames of overviews are resized."""
    crop_rules: PixelRules = PixelRules()
    """How frames of crops are resized."""
    decoder: video.Decoder = "pyav"
    """Library that decodes; decord for the files that it reads exactly."""

    def __post_init__(self):
        for name in ("workers", "ready"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"reader.{name}: {getattr(self, name)}; give a whole number of at least 1"
                )
        if not self.deadline > 0:
            raise ValueError(f"reader.deadline: {self.deadline}; give seconds, more than 0")
        video.require_decoder("reader.decoder", self.decoder)


@dataclasses.dataclass(frozen=True)
class ReadTask:
    """Frames to read from a file: their numbers, or the number of frames of an overview.

    `rules` says how they are resized, and `decoder` which library decodes.
    """

    path: str
    wanted: tuple[int, ...] | int
    rules: FrameRules
    decoder: video.Decoder = "pyav"


@dataclasses.dataclass(frozen=True)
class ReadFrames:
    """Frames that a worker process has read, resized by `rules`; none if the task wanted none."""

    info: VideoInfo
    rules: FrameRules
    indices: tuple[int, ...]
    frames: UInt8[np.ndarray, "m h w 3"]


class FrameReader:
    """Reads frames in worker processes, resized as the model sees them.

    `ahead` requests frames; `read` and `probe` wait for them. Use it in a `with` block, or call
    `close`.

    Attributes:
        frames: Number of frames that `read` has returned.
        late: Number of calls, to `probe` as well, without a matching request. They had to wait.
    """

    def __init__(self, settings: ReaderSettings):
        self.settings = settings
        self.frames = 0
        self.late = 0
        self._workers: Workers[ReadTask, ReadFrames] = Workers(
            read_in_worker, settings.workers, settings.deadline
        )
        # Open requests by path, the path that was requested longest ago first. A path can have
        # several requests, because two rows of a batch may want different frames of one file.
        self._requests: collections.OrderedDict[str, list[Future[ReadFrames]]] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()

    def ahead(
        self,
        path: str | os.PathLike,
        wanted: Sequence[int] | Int64[np.ndarray, " m"] | int,
        crop: bool = False,
    ) -> None:
        """Request frames of a file without waiting for them. `read` raises any error.

        Args:
            path: The file.
            wanted: Frame numbers, or the number of frames of an overview.
            crop: Whether a crop shows them, which may have limits of its own.
        """
        if not isinstance(wanted, int):
            wanted = tuple(int(n) for n in wanted)
        rules = self.settings.crop_rules if crop else self.settings.rules
        with self._lock:
            future = self._submit(str(path), wanted, rules)
            self._requests.setdefault(str(path), []).append(future)
            # Requests that are never fetched must not fill the memory: drop the oldest.
            while sum(map(len, self._requests.values())) > self.settings.ready:
                self._requests.popitem(last=False)

    def probe(self, path: str | os.PathLike) -> VideoInfo:
        """List the frames of a file, like `video.probe`. Uses an open request if there is one.

        Raises:
            VideoError: The file cannot be read.
        """
        with self._lock:
            futures = list(self._requests.get(str(path), ()))
        for future in futures:
            # A request for frames that do not exist fails although the file can be read.
            with contextlib.suppress(IndexError):
                return _result(str(path), future).info
        return _result(str(path), self._submit_late(str(path), (), self.settings.rules)).info

    def read(
        self,
        path: str | os.PathLike,
        indices: Sequence[int] | Int64[np.ndarray, " m"],
        rules: FrameRules | None = None,
    ) -> UInt8[np.ndarray, "m h w 3"]:
        """Return resized frames, and drop the request that held them.

        Args:
            path: The file.
            indices: Frame numbers, as in `video.read`.
            rules: How they are resized; None: as in overviews.

        Raises:
            VideoError: The file cannot be read.
            IndexError: A frame does not exist.
        """
        wanted = [int(n) for n in indices]
        rules = rules or self.settings.rules
        with self._lock:
            # Take the requests out while they are examined: two threads must not share one.
            futures = self._requests.pop(str(path), [])
        for future in list(futures):
            # A VideoError drops the other requests for this file too: they would fail as well.
            try:
                result = _result(str(path), future)
            except IndexError:
                # This request named frames that do not exist. The wanted ones may.
                futures.remove(future)
                continue
            if rules == result.rules and set(wanted) <= set(result.indices):
                futures.remove(future)
                self._put_back(str(path), futures)
                return self._select(result, wanted)
        late = self._submit_late(str(path), tuple(wanted), rules)
        return self._select(_result(str(path), late), wanted)

    def forget(self) -> None:
        """Drop all open requests, for example because the data resume at another place."""
        with self._lock:
            for futures in self._requests.values():
                for future in futures:
                    future.cancel()
            self._requests.clear()

    def close(self) -> None:
        """Drop all requests and stop the processes."""
        self.forget()
        self._workers.close()

    def __enter__(self) -> FrameReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(
        self, path: str, wanted: tuple[int, ...] | int, rules: FrameRules
    ) -> Future[ReadFrames]:
        return self._workers.submit(ReadTask(path, wanted, rules, self.settings.decoder))

    def _submit_late(
        self, path: str, wanted: tuple[int, ...], rules: FrameRules
    ) -> Future[ReadFrames]:
        self.late += 1
        return self._submit(path, wanted, rules)

    def _put_back(self, path: str, futures: list[Future[ReadFrames]]) -> None:
        """Keep the requests for other frames of the same file."""
        if not futures:
            return
        with self._lock:
            # `ahead` may have added newer requests in the meantime.
            self._requests[path] = futures + self._requests.get(path, [])

    def _select(self, result: ReadFrames, wanted: Sequence[int]) -> UInt8[np.ndarray, "m h w 3"]:
        self.frames += len(wanted)
        if list(result.indices) == list(wanted):
            return result.frames
        return result.frames[[result.indices.index(n) for n in wanted]]


def _result(path: str, future: Future[ReadFrames]) -> ReadFrames:
    try:
        return future.result()
    except WorkerError as error:
        raise VideoError(path, str(error)) from error


def read_in_worker(task: ReadTask) -> ReadFrames:
    """Read the frames of one task in a worker process. If it wants none, only list the file.

    Raises:
        VideoError: The file cannot be read, or its frames are too narrow to be resized.
        IndexError: A frame does not exist.
    """
    info = video.probe(task.path)
    indices = task.wanted
    if isinstance(indices, int):
        indices = tuple(overview_indices(info.frames, indices).tolist())
    if not indices:
        return ReadFrames(info, task.rules, (), np.zeros((0, 0, 0, 3), np.uint8))
    frames = video.read(task.path, indices, task.rules, task.decoder)
    return ReadFrames(info, task.rules, indices, frames)
