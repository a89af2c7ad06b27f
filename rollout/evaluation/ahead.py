"""Reads the overviews of the questions that come next while the engine plays others."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from paravt_jax.data.frame_reader import FrameReader
from rollout.evaluation.benchmarks import Item, VideoFolder
from rollout.evaluation.sharing import Deal


class ReadAhead:
    """Requests overviews ahead, for all replicas of a host.

    Args:
        reader: reads them, and keeps a bounded number of them.
        videos: finds the files.
        frames: number of frames of an overview.
        count: number of questions to look ahead, which is also how many are played side by side.
    """

    def __init__(self, reader: FrameReader, videos: VideoFolder, frames: int, count: int):
        self._reader = reader
        self._videos = videos
        self._frames = frames
        self._count = count
        self._lock = threading.Lock()
        self._count_taken = 0
        self._known: set[str] = set()  # videos that were taken or requested

    def items(self, deal: Deal) -> Iterator[Item]:
        """Take items from the deal, and request the overviews of those that come next."""
        for item in deal.items():
            with self._lock:
                self._count_taken += 1
                self._known.add(item.question.video)
                # The first ones are played at once, and ask for their overviews themselves.
                if self._count_taken >= self._count:
                    self._request(deal.coming(self._count))
            yield item

    def _request(self, items: list[Item]) -> None:
        for name in [item.question.video for item in items]:
            path = self._videos.find(name)
            if path is not None and name not in self._known:
                self._known.add(name)
                self._reader.ahead(self._videos.root / path, self._frames)
