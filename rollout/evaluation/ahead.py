"""Reads the next questions' overviews in worker processes while the engine decodes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
from jaxtyping import UInt8

from paravt_jax.data import video
from paravt_jax.data.frame_reader import FrameReader, ReaderSettings
from paravt_jax.data.frames import FrameRules, VideoInfo
from paravt_jax.data.sizes import PixelRules
from rollout.evaluation.benchmarks import Item, VideoFolder
from rollout.evaluation.sharing import Deal

_DEADLINE = 600.0  # seconds for an overview, which may be of a film on a slow disk


def worker_count(count: int) -> int:
    """Number of processes that read `count` overviews ahead."""
    return min(count, max(1, (os.cpu_count() or 1) - 1))


class ReadAhead:
    """Reads videos for features (a `FrameSource`): overviews ahead, everything else when asked.

    Pixels are the same either way. Memory holds at most `count` overviews. Use it in a `with`
    block, or call `close`.

    Args:
        videos: finds the files.
        frames: number of frames of an overview.
        rules: how they are resized.
        count: number of questions to look ahead, which is also how many are played side by side.
    """

    def __init__(self, videos: VideoFolder, frames: int, rules: PixelRules, count: int):
        workers = worker_count(count)
        self._reader = FrameReader(ReaderSettings(workers, _DEADLINE, ready=count, rules=rules))
        self._videos = videos
        self._frames = frames
        self._count = count
        self._lock = threading.Lock()
        self._count_taken = 0
        self._taken: set[str] = set()  # videos
        self._requested: dict[str, str] = {}  # files, with the videos that they are

    def items(self, deal: Deal) -> Iterator[Item]:
        """Take items from the deal, and request the overviews of those that come next."""
        for item in deal.items():
            with self._lock:
                self._count_taken += 1
                self._taken.add(item.question.video)
                # The first ones are taken at once: nothing is decoded yet while they are read.
                if self._count_taken >= self._count:
                    self._request(deal.coming(self._count))
            yield item
            # The next one is asked for: this overview has been read by now, or its question was
            # left out. A request that stayed would take the place of others.
            with self._lock:
                self._drop(item.question.video)

    def _request(self, items: list[Item]) -> None:
        coming = dict.fromkeys(item.question.video for item in items)
        for file, name in list(self._requested.items()):
            # Another host was faster. The reader drops its oldest requests by itself.
            if name not in coming and name not in self._taken:
                del self._requested[file]
        for name in coming:
            path = self._videos.find(name)
            file = str(self._videos.root / (path or name))
            known = name in self._taken or file in self._requested
            if path is not None and not known and len(self._requested) < self._count:
                self._requested[file] = name
                self._reader.ahead(file, self._frames)

    def _drop(self, video: str) -> None:
        for file in [file for file, name in self._requested.items() if name == video]:
            del self._requested[file]

    def probe(self, path: str | os.PathLike) -> VideoInfo:
        """List the frames of a file, which may have been read ahead."""
        if str(path) in self._requested:
            return self._reader.probe(path)
        return video.probe(path)

    def read(
        self, path: str | os.PathLike, indices: list[int], rules: FrameRules | None
    ) -> UInt8[np.ndarray, "m h w 3"]:
        """Read frames, which may have been read ahead."""
        if str(path) in self._requested and rules == self._reader.settings.rules:
            with self._lock:
                self._requested.pop(str(path), None)
            return self._reader.read(path, indices, rules)
        return video.read(path, indices, rules)

    def close(self) -> None:
        """Stop the processes."""
        self._reader.close()

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
