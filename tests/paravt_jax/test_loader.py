from __future__ import annotations

import itertools
import json

import grain
import pytest

from paravt_jax.data import datasets, loader
from paravt_jax.world import text as world_text
from paravt_jax.world import videos as world


def _take(stream, count):
    return list(itertools.islice(stream, count))


def test_a_pass_shows_every_record_once_and_the_next_pass_another_order():
    seen = [record for batch in _take(loader.stream(range(20), 0, 4), 10) for record in batch]
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))
    assert seen[:20] != seen[20:]


def test_the_seed_decides_the_order():
    first, same, other = (_take(loader.stream(range(50), seed, 5), 10) for seed in (1, 1, 2))
    assert first == same != other


def test_a_state_brings_back_exactly_what_came_next():
    stream = loader.stream(range(23), 3, 4)
    _take(stream, 9)  # into the second pass
    state = json.loads(json.dumps(stream.get_state()))
    expected = _take(stream, 20)
    fresh = loader.stream(range(23), 3, 4)
    fresh.set_state(state)
    assert _take(fresh, 20) == expected
    stream.set_state(state)
    assert _take(stream, 20) == expected


def test_batches_may_be_larger_than_the_source():
    batch = next(loader.stream(range(3), 0, 8))
    assert len(batch) == 8 and set(batch) == {0, 1, 2}


def test_stored_records_pass_through_unchanged(tmp_path):
    videos = world.plan(world.WorldSettings(train_videos=3, heldout_videos=1))
    settings = world_text.TextSettings(groups=1)
    conversations = list(world_text.main_conversations(videos, settings))
    datasets.write_splits(tmp_path, {"main": conversations})
    batches = _take(loader.stream(datasets.open_split(tmp_path, "main"), 0, 4), 4)
    found = [conversation for batch in batches for conversation in batch]
    assert sorted(c.id for c in found) == sorted(c.id for c in conversations)
    assert all(conversation in conversations for conversation in found)


def test_the_iterator_is_one_that_checkpoints_know():
    assert isinstance(loader.stream(range(3), 0, 1), grain.DatasetIterator)


@pytest.mark.parametrize(("source", "batch"), [([], 1), ([1], 0)])
def test_impossible_streams_are_refused(source, batch):
    with pytest.raises(ValueError, match="loader"):
        loader.stream(source, 0, batch)


def test_batches_ahead_are_told_before_they_come_and_come_in_order():
    told = []
    ahead = loader.Ahead(loader.stream(range(40), 0, 4), 3, told.append)
    expected = _take(loader.stream(range(40), 0, 4), 8)
    for n in range(4):
        assert next(ahead) == expected[n]
        assert told == expected[: n + 4]
    assert _take(loader.Ahead(loader.stream(range(40), 0, 4), 0, told.append), 8) == expected


def test_a_state_knows_nothing_of_what_was_looked_at_ahead():
    def fresh():
        return loader.Ahead(loader.stream(range(23), 3, 4), 3, lambda batch: None)

    first = fresh()
    start = json.loads(json.dumps(first.get_state()))
    everything = _take(first, 30)
    for count in (1, 5, 9):
        stream = fresh()
        _take(stream, count)
        state = json.loads(json.dumps(stream.get_state()))
        again = fresh()
        _take(again, 2)
        again.set_state(state)
        assert _take(again, 20) == everything[count : count + 20] == _take(stream, 20)
    first.set_state(start)
    assert _take(first, 30) == everything
    with pytest.raises(ValueError, match="-1 batches ahead"):
        loader.Ahead(loader.stream(range(4), 0, 1), -1, lambda batch: None)
