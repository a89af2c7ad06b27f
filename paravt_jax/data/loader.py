"""The order of records in training: shuffled, repeated, batched, and exactly resumable.

Records pass through unchanged, so one stream serves questions, packed rows and captions. Every
process of a run sees the same batches and takes its share of each.
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
    """Yield endless batches of records, shuffling the source anew for every pass.

    The order depends on `seed` and the iterator's state only. `get_state()` returns a small dict
    that JSON can store; `set_state` resumes exactly there. `grain.checkpoint` can save both.

    Args:
        source: The records.
        seed: Seed of the shuffling.
        batch: Records per batch. A batch may span two passes.

    Raises:
        ValueError: `source` is empty, or `batch` is below 1.
    """
    if not len(source) or batch < 1:
        raise ValueError(
            f"loader: {len(source)} records in batches of {batch}; both need at least 1"
        )
    order = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
    batches = order.batch(batch, drop_remainder=True, batch_fn=tuple)
    # Records are cheap to read. Without threads, nothing keeps running when a process is told to
    # stop.
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


class Ahead(Generic[_Record]):
    """A stream that announces its next `depth` batches, so that their frames can be read in time.

    Args:
        source: The stream.
        depth: Number of batches to look ahead; 0 announces a batch when it is returned.
        start: Called once with every batch before it is returned.
    """

    def __init__(
        self, source: grain.DatasetIterator[_Record], depth: int, start: Callable[[_Record], None]
    ):
        if depth < 0:
            raise ValueError(f"loader: {depth} batches ahead; give 0 or more")
        self._source = source
        self._depth = depth
        self._start = start
        # Keep every batch with the state of the source before it. A checkpoint must resume at the
        # batch that is returned next, but the source itself is already ahead of it.
        self._next: collections.deque[tuple[dict[str, Any], _Record]] = collections.deque()

    def __iter__(self) -> Ahead[_Record]:
        return self

    def __next__(self) -> _Record:
        self._fill(self._depth + 1)
        _, batch = self._next.popleft()
        # Announce the next batches now, so that they load while the caller works on this one.
        self._fill(self._depth)
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the state from which `set_state` resumes with the batch that comes next."""
        if not self._next:
            return self._source.get_state()
        state, _ = self._next[0]
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume at `state`. Batches that were read ahead are dropped."""
        self._next.clear()
        self._source.set_state(state)

    def _fill(self, count: int) -> None:
        while len(self._next) < count:
            state = self._source.get_state()
            batch = next(self._source)
            self._start(batch)
            self._next.append((state, batch))
