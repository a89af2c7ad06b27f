"""The order in which records are seen: shuffled, repeated, batched, and exactly resumable.

Records pass through unchanged, so one stream serves questions, packed rows and captions. Every
process of a run sees the same batches and takes its share of each. Seed and state decide what comes
next.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grain

_Record = TypeVar("_Record")


def stream(
    source: Sequence[_Record], seed: int, batch: int
) -> grain.DatasetIterator[tuple[_Record, ...]]:
    """Endless batches, each a tuple of `batch` records; every pass over the source is shuffled anew.

    The iterator's `get_state()` is a small JSON-able dict, and `set_state` goes exactly there;
    `grain.checkpoint` knows both. Raises ValueError for an empty source.
    """
    if not len(source) or batch < 1:
        raise ValueError(
            f"loader: {len(source)} records in batches of {batch}; both need at least 1"
        )
    order = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
    batches = order.batch(batch, drop_remainder=True, batch_fn=tuple)
    # Reading a record is cheap, so no threads: nothing runs on when a process is told to end.
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


class Ahead(Generic[_Record]):
    """A stream whose next `depth` batches are told to `start` before they are asked for, so that their frames can be on the way.

    The state is the stream's as of the batch that comes next: what was looked at ahead comes again where a run goes on.
    """

    def __init__(
        self, source: grain.DatasetIterator[_Record], depth: int, start: Callable[[_Record], None]
    ):
        if depth < 0:
            raise ValueError(f"loader: {depth} batches ahead; give 0 or more")
        self._source, self._depth, self._start = source, depth, start
        self._next: collections.deque[tuple[dict[str, Any], _Record]] = collections.deque()

    def __iter__(self) -> Ahead[_Record]:
        return self

    def __next__(self) -> _Record:
        self._fill(self._depth + 1)
        batch = self._next.popleft()[1]
        self._fill(self._depth)
        return batch

    def get_state(self) -> dict[str, Any]:
        return self._next[0][0] if self._next else self._source.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._next.clear()
        self._source.set_state(state)

    def _fill(self, count: int) -> None:
        while len(self._next) < count:
            state = self._source.get_state()
            batch = next(self._source)
            self._start(batch)
            self._next.append((state, batch))
