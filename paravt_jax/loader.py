"""The order in which records are seen: shuffled, dealt to processes, repeated, batched - and exactly resumable.

Owns the order and nothing else: records come from `datasets` (or any sequence) and leave unchanged, so one stream serves
questions, groups of demonstrations and captions. Refuses to hold frames or tokens.
Invariant: seed, shard and state decide what comes next; over all processes a pass shows every record once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import grain

_Record = TypeVar("_Record")


def stream(
    source: Sequence[_Record], seed: int, batch: int, process_index: int = 0, process_count: int = 1
) -> grain.DatasetIterator[tuple[_Record, ...]]:
    """Endless batches, each a tuple of `batch` records; every pass over the source is shuffled anew.

    The one shuffled order is dealt to processes like cards: process i of n gets every n-th record from the i-th on. The
    iterator's `get_state()` is a small JSON-able dict and `set_state` goes exactly there; `grain.checkpoint` knows both.
    Raises ValueError for an empty source or a shard that does not exist.
    """
    if not len(source) or batch < 1:
        raise ValueError(f"loader: {len(source)} records in batches of {batch}; both need at least 1")
    if not 0 <= process_index < process_count:
        raise ValueError(f"loader: process {process_index} of {process_count}; give an index from 0 to {process_count - 1}")
    order = grain.MapDataset.source(source).seed(seed).shuffle().repeat()[process_index::process_count]
    batches = order.batch(batch, drop_remainder=True, batch_fn=tuple)
    # Reading a record is cheap, so no threads: nothing runs on when a process is told to end.
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
