"""The order of records in training: shuffled, repeated, batched, and exactly resumable.

Records pass through unchanged, so one stream serves questions, packed rows and captions. Every
process of a run sees the same batches and takes its share of each.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import grain

_Record = TypeVar("_Record")
_Begun = TypeVar("_Begun")
_Batch = TypeVar("_Batch")


def stream(
    source: Sequence[_Record], seed: int, batch: int
) -> grain.DatasetIterator[tuple[_Record, ...]]:
    """Yield endless batches of records, shuffling the source anew for every pass.

    The order depends on `seed` and the iterator's state only. `get_state()` returns a small dict
    that JSON can store; `set_state` resumes exactly there. `grain.checkpoint` can save both.

    Args:
        source: The records, at least one.
        seed: Seed of the shuffling.
        batch: Records per batch, at least 1. A batch may span two passes.
    """
    order = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
    batches = order.batch(batch, drop_remainder=True, batch_fn=tuple)
    # Records are cheap to read. Without threads, nothing keeps running when a process is told to
    # stop.
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


class Ahead(Generic[_Record, _Begun]):
    """A stream that begins its next `depth` batches, so that their frames can be read in time.

    Args:
        source: The stream.
        depth: Number of batches to look ahead; 0 begins a batch when it is returned.
        begin: Called once with every batch of the source, in order. This stream yields its results.
    """

    def __init__(
        self,
        source: grain.DatasetIterator[_Record] | Ahead[Any, _Record],
        depth: int = 0,
        begin: Callable[[_Record], _Begun] = lambda batch: batch,
    ):
        self._source = source
        self._depth = depth
        self._begin = begin
        # Each batch is kept with the state of the source before it. A checkpoint must resume at the
        # batch that is returned next, and the source itself has already moved on.
        self._next: collections.deque[tuple[dict[str, Any], _Begun]] = collections.deque()

    def __iter__(self) -> Ahead[_Record, _Begun]:
        return self

    def __next__(self) -> _Begun:
        self.peek(self._depth + 1)
        _, batch = self._next.popleft()
        # Begin the next batches now, so that they load while the caller works on this one.
        self.peek(self._depth)
        return batch

    def peek(self, count: int) -> list[_Begun]:
        """Begin the next batches, and return them without taking them."""
        while len(self._next) < count:
            state = self._source.get_state()
            self._next.append((state, self._begin(next(self._source))))
        return [batch for _, batch in itertools.islice(self._next, count)]

    def get_state(self) -> dict[str, Any]:
        """Return the state from which `set_state` resumes with the batch that comes next."""
        return self._next[0][0] if self._next else self._source.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume at `state`. Batches that were begun ahead are dropped."""
        self._next.clear()
        self._source.set_state(state)


class Pipeline(Generic[_Record, _Begun, _Batch]):
    """Prepares the batches of the next steps while the devices compute this one.

    A batch is prepared in two stages: `begin` queues work on the devices, and `finish` waits for
    it. Devices run what they are given in order. So the work of batch 3 is queued before update 2,
    and its result is there early enough to be laid out and transferred while update 2 runs:

        devices   | update 1             | begun 3 | update 2             | begun 4 | update 3
        host      | finish 2, begin 3    |         | finish 3, begin 4    |

    Call `prepare` before the first batch, and after each update was dispatched, before waiting for
    it. Without it, a batch is prepared when it is asked for. Batches are the same either way.

    Args:
        source: The stream of records.
        begin: Begins a batch.
        finish: Completes it.
    """

    def __init__(
        self,
        source: grain.DatasetIterator[_Record] | Ahead[Any, _Record],
        begin: Callable[[_Record], _Begun],
        finish: Callable[[_Begun], _Batch],
    ):
        # An error takes the place of its batch.
        self._begun = Ahead(source, begin=lambda record: _attempt(lambda: begin(record)))
        self._finished = Ahead(
            self._begun, begin=lambda begun: _attempt(lambda: finish(begun.result()))
        )

    def __iter__(self) -> Iterator[_Batch]:
        return self

    def __next__(self) -> _Batch:
        """Return the next batch, or raise the error of its preparation."""
        return next(self._finished).result()

    def prepare(self, left: int) -> None:
        """Finish the next batch and begin the one after it, unless that was done.

        No more than `left` batches, those that are still needed, are prepared.
        """
        if left > 0:
            self._finished.peek(1)
        if left > 1:
            self._begun.peek(1)

    def get_state(self) -> dict[str, Any]:
        """Return the state from which `set_state` resumes with the batch that comes next."""
        return self._finished.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume at `state`. Batches that were prepared ahead are dropped."""
        self._finished.set_state(state)


def _attempt(make: Callable[[], _Batch]) -> Future[_Batch]:
    """Return the result of `make`, or the error that it raised, which taking its batch raises."""
    outcome: Future[_Batch] = Future()
    try:
        outcome.set_result(make())
    except Exception as error:
        outcome.set_exception(error)
    return outcome
