"""Reads frames in worker processes, which decode and resize them beside sampling and updates.

The pixels are those of `video.read`, whether or not they were requested ahead. A file that hangs or
crashes its worker raises `VideoError`, like any other bad file.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from jaxtyping import Int64

from paravt_jax.checks import require_at_least
from paravt_jax.data import video
from paravt_jax.data.frames import PixelRules, ReadFrames, ReadTask, VideoError
from paravt_jax.data.workers import WorkerError, Workers, cancel

PATIENCE = 600.0
"""Time limit for reading a file that may be a film on a slow disk, in seconds."""

# Priorities: requests that somebody awaits go before those that are read ahead.
_AWAITED = 0
_AHEAD = 1


@dataclasses.dataclass(frozen=True)
class ReaderSettings:
    """Worker processes, time limit and frame sizes of a `FrameReader`."""

    workers: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)
    """Number of worker processes; by default one per core."""
    deadline: float = PATIENCE
    """Time limit for reading one file, in seconds."""
    ready: int = 256
    """Upper bound on requests of `ahead`; one for 64 frames of 224 x 224 takes 9.2 MiB."""
    rules: PixelRules = PixelRules()
    """How frames of overviews are resized."""
    crop_rules: PixelRules = PixelRules()
    """How frames of crops are resized."""
    decoder: video.Decoder = "pyav"
    """Library that decodes; decord for the files that it reads exactly."""
    whole: int = 0
    """Of videos with at most this many frames, `ahead` reads all in place of an overview."""

    def __post_init__(self):
        require_at_least("reader", self, 1, "workers", "ready")
        if not self.deadline > 0:
            raise ValueError(f"reader.deadline: {self.deadline}; give seconds, more than 0")
        video.require_decoder("reader.decoder", self.decoder)


@dataclasses.dataclass(eq=False)
class _Ahead:
    """A request of `ahead` whose frames have not been taken."""

    task: ReadTask
    call: Future[ReadFrames]
    awaited: bool = False
    """Whether `request` has given its result to somebody."""

    def drop(self) -> None:
        """Do not read it, unless a worker has begun or somebody awaits it."""
        if not self.awaited:
            self.call.cancel()


class FrameReader:
    """Reads frames in worker processes, resized as the model sees them (a `FrameSource`).

    Neither `ahead` nor `request` waits. What `request` asks for is read before what `ahead` does.
    Use it in a `with` block, or call `close`. Several threads may use it.
    """

    def __init__(self, settings: ReaderSettings):
        self.settings = settings
        self._workers: Workers[ReadTask, ReadFrames] = Workers(
            functools.partial(video.fetch, decoder=settings.decoder),
            settings.workers,
            settings.deadline,
        )
        # The oldest first.
        self._ahead: list[_Ahead] = []
        self._lock = threading.Lock()

    def ahead(
        self,
        path: str | os.PathLike,
        wanted: Sequence[int] | Int64[np.ndarray, " m"] | int,
        crop: bool = False,
    ) -> None:
        """Read frames of a file that `request` will ask for.

        Args:
            path: The file.
            wanted: Frame numbers, or the number of frames of an overview.
            crop: Whether a crop shows them, which may have limits of its own.
        """
        if not isinstance(wanted, int):
            wanted = tuple(int(n) for n in wanted)
        rules = self.settings.crop_rules if crop else self.settings.rules
        task = ReadTask(str(path), wanted, rules, self.settings.whole)
        with self._lock:
            self._ahead.append(_Ahead(task, self._workers.submit(task, _AHEAD)))
            # Frames that are never asked for must not fill the memory: drop the oldest.
            if len(self._ahead) > self.settings.ready:
                self._ahead.pop(0).drop()

    def request(self, task: ReadTask) -> Future[ReadFrames]:
        """Begin to read, or take what `ahead` has begun to read, which may be more frames.

        Returns:
            A future of the frames. It fails with `VideoError` if the file cannot be read, if it
            takes longer than the deadline, or if it crashes the process.
        """
        with self._lock:
            for read in self._ahead:
                if _brings(read.task, task):
                    # Every request lists the file. Only frames are taken out.
                    if task.wanted != ():
                        self._ahead.remove(read)
                    self._hurry(read)
                    return _of_file(task.path, read.call)
            return _of_file(task.path, self._workers.submit(task, _AWAITED))

    def close(self) -> None:
        """Stop the processes. Futures that are not done yet are cancelled or fail."""
        self._ahead.clear()
        self._workers.close()

    def __enter__(self) -> FrameReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hurry(self, read: _Ahead) -> None:
        """Put a task before all that is read ahead: somebody awaits it now."""
        # It can be cancelled only if no worker has begun it.
        if not read.awaited and read.call.cancel():
            read.call = self._workers.submit(read.task, _AWAITED)
        read.awaited = True


def _brings(known: ReadTask, task: ReadTask) -> bool:
    """Return whether the frames of one task include those of another."""
    if known.path != task.path:
        return False
    if task.wanted == ():
        return True
    if isinstance(known.wanted, int) or isinstance(task.wanted, int):
        return known == task  # which frames an overview has is not known yet
    return known.rules == task.rules and set(task.wanted) <= set(known.wanted)


def _of_file(path: str, call: Future[ReadFrames]) -> Future[ReadFrames]:
    """Return a future with the result of a worker's call. Its failures are those of the file."""
    future: Future[ReadFrames] = Future()
    call.add_done_callback(functools.partial(_pass_on, path, future))
    return future


def _pass_on(path: str, future: Future[ReadFrames], done: Future[ReadFrames]) -> None:
    if done.cancelled():
        cancel(future)
        return
    error = done.exception()
    if error is None:
        future.set_result(done.result())
    else:
        future.set_exception(
            VideoError(path, str(error)) if isinstance(error, WorkerError) else error
        )
