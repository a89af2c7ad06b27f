"""The order of records: shuffled by a seed, endless, and exactly resumable."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import grain
import pytest

from paravt_jax.data import loader


def take(stream, count):
    return list(itertools.islice(stream, count))


def test_a_pass_shows_every_record_once_and_the_next_pass_another_order():
    seen = [record for batch in take(loader.stream(range(20), 0, 4), 10) for record in batch]
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))
    assert seen[:20] != seen[20:]


def test_the_seed_decides_the_order():
    first, same, other = (take(loader.stream(range(50), seed, 5), 10) for seed in (1, 1, 2))
    assert first == same != other


def test_a_stream_resumes_from_its_state():
    stream = loader.stream(range(23), 3, 4)
    # Nine batches end in the second pass.
    take(stream, 9)
    state = json.loads(json.dumps(stream.get_state()))
    expected = take(stream, 20)
    fresh = loader.stream(range(23), 3, 4)
    fresh.set_state(state)
    assert take(fresh, 20) == expected
    stream.set_state(state)
    assert take(stream, 20) == expected


class Numbers(grain.DatasetIterator[tuple[int, ...]]):
    """A stream of 0, 1, 2 ..., whose state is the next number."""

    def __init__(self):
        super().__init__()
        self.next = 0

    def __next__(self) -> tuple[int, ...]:
        self.next += 1
        return (self.next - 1,)

    def get_state(self) -> dict[str, int]:
        return {"next": self.next}

    def set_state(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def test_batches_are_announced_ahead_and_come_in_order():
    announced = []

    def announce(batch):
        announced.append(batch)
        return batch

    ahead = loader.Ahead(loader.stream(range(40), 0, 4), 3, announce)
    expected = take(loader.stream(range(40), 0, 4), 8)
    for n in range(4):
        assert next(ahead) == expected[n]
        assert announced == expected[: n + 4]
    unannounced = loader.Ahead(loader.stream(range(40), 0, 4), 0, announce)
    assert take(unannounced, 8) == expected


def test_a_state_does_not_depend_on_batches_read_ahead():
    def fresh() -> loader.Ahead:
        return loader.Ahead(Numbers(), 3)

    for count in (0, 1, 5, 9):
        stream = fresh()
        take(stream, count)
        state = stream.get_state()
        resumed = fresh()
        take(resumed, 2)
        resumed.set_state(state)
        assert take(resumed, 20) == take(stream, 20) == [(count + n,) for n in range(20)]


class Device:
    """Runs what it is given in order, in a thread of its own, like an accelerator."""

    def __init__(self):
        self.log: list[str] = []
        self._queue = ThreadPoolExecutor(1)
        self._laid_out = {n: threading.Event() for n in range(20)}

    def begin(self, batch: tuple[int, ...]) -> tuple[int, Future]:
        (n,) = batch
        return n, self._queue.submit(self.log.append, f"encode {n}")

    def finish(self, begun: tuple[int, Future]) -> int:
        n, encoded = begun
        encoded.result(timeout=10)
        self._laid_out[n].set()
        return n

    def update(self, n: int, awaited: int | None) -> Future:
        """Update with batch n, which ends only when batch `awaited` is laid out."""

        def run() -> bool:
            self.log.append(f"update {n}")
            return awaited is None or self._laid_out[awaited].wait(10)

        return self._queue.submit(run)


def test_the_next_batch_is_laid_out_while_an_update_runs():
    """Each update waits for the next batch, which is possible only if the two overlap."""
    device = Device()
    batches = loader.Pipeline(Numbers(), device.begin, device.finish)
    batches.prepare(6)
    for n in range(6):
        assert next(batches) == n
        update = device.update(n, n + 1 if n < 5 else None)
        batches.prepare(5 - n)
        assert update.result(timeout=20)
    # Vectors of batch 2 come before update 1 ends, or its layout would have to wait for it.
    order = [device.log.index(f"encode {n + 1}") < device.log.index(f"update {n}") for n in (1, 4)]
    assert order == [True, True]
    assert len(device.log) == 12, "a batch was prepared for a step that does not exist"


def test_a_state_does_not_depend_on_batches_prepared_ahead():
    def fresh() -> loader.Pipeline:
        return loader.Pipeline(Numbers(), lambda record: record, lambda begun: begun)

    batches = fresh()
    for n in range(4):
        assert batches.get_state() == {"next": n}
        assert next(batches) == (n,) and batches.get_state() == {"next": n + 1}
        batches.prepare(10)
    resumed = fresh()
    resumed.prepare(10)
    resumed.set_state(batches.get_state())
    assert take(resumed, 3) == take(batches, 3) == [(4,), (5,), (6,)]


@pytest.mark.parametrize("stage", ["begin", "finish"])
def test_the_error_of_a_batch_is_raised_when_it_is_asked_for(stage):
    def fail(name):
        def make(record):
            if record == (2,) and name == stage:
                raise ValueError("batch 2")
            return record

        return make

    batches = loader.Pipeline(Numbers(), fail("begin"), fail("finish"))
    for n in range(2):
        assert next(batches) == (n,)
        batches.prepare(10)
    assert batches.get_state() == {"next": 2}
    with pytest.raises(ValueError, match="batch 2"):
        next(batches)
