"""Reads frames in worker processes, which decode and resize them beside sampling and updates.

The pixels are those of `video.read`, whether or not they were requested ahead. A file that hangs or
crashes its worker raises `VideoError`, like any other bad file.
"""

from __future__ import annotations

import collections
import functools
import os
import threading
from concurrent.futures import Future

from paravt_jax.data import video
from paravt_jax.data.frames import ReadFrames, ReadTask, VideoError
from paravt_jax.data.workers import WorkerError, Workers

PATIENCE = 600.0
"""Time limit for reading a file that may be a film on a slow disk, in seconds."""


class FrameReader(Workers[ReadTask, ReadFrames]):
    """Reads frames in worker processes, resized as the model sees them (a `FrameSource`).

    Neither `ahead` nor `request` waits. Files are read in the order of these calls. Use it in a
    `with` block, or call `close`. Several threads may use it.

    Args:
        workers: Number of worker processes; by default one per core.
        deadline: Time limit for reading one file, in seconds.
        ready: Upper bound on requests of `ahead`; one for 64 frames of 224 x 224 takes 9.2 MiB.
        decoder: Library that decodes; decord for the files that it reads exactly.
    """

    def __init__(
        self,
        workers: int = os.cpu_count() or 1,
        deadline: float = PATIENCE,
        ready: int = 256,
        decoder: video.Decoder = "pyav",
    ):
        super().__init__(functools.partial(video.fetch, decoder=decoder), workers, deadline)
        # Frames that are never asked for must not fill the memory: the oldest are dropped.
        self._ahead: collections.deque[tuple[ReadTask, Future[ReadFrames]]] = collections.deque(
            maxlen=ready
        )
        self._ahead_lock = threading.Lock()

    def ahead(self, task: ReadTask) -> None:
        """Read frames that `request` will ask for."""
        with self._ahead_lock:
            self._ahead.append((task, self.submit(task)))

    def request(self, task: ReadTask) -> Future[ReadFrames]:
        """Begin to read, or take what `ahead` has begun to read, which may be more frames.

        Returns:
            A future of the frames. It fails with `VideoError` if the file cannot be read, if it
            takes longer than the deadline, or if it crashes the process.
        """
        with self._ahead_lock:
            for number, (known, future) in enumerate(self._ahead):
                if _brings(known, task):
                    # Every request lists the file. Only frames are taken out.
                    if task.wanted != ():
                        del self._ahead[number]
                    return future
        return self.submit(task)

    def call(self, argument: ReadTask) -> ReadFrames:
        """Read in a worker process. What goes wrong with the process is a failure of the file."""
        try:
            return super().call(argument)
        except WorkerError as error:
            raise VideoError(argument.path, str(error)) from error


def _brings(known: ReadTask, task: ReadTask) -> bool:
    """Return whether the frames of one task include those of another."""
    if known.path != task.path:
        return False
    if task.wanted == ():
        return True
    if isinstance(known.wanted, int) or isinstance(task.wanted, int):
        return known == task  # which frames an overview has is not known yet
    return known.rules == task.rules and set(task.wanted) <= set(known.wanted)
