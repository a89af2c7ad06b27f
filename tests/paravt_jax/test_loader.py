"""The order of records: shuffled by a seed, endless, and exactly resumable."""

from __future__ import annotations

import itertools
import json

import grain
import pytest

from paravt_jax.data import datasets, loader
from paravt_jax.world import text as world_text
from paravt_jax.world import videos as world


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


def test_batches_may_be_larger_than_the_source():
    batch = next(loader.stream(range(3), 0, 8))
    assert len(batch) == 8
    assert set(batch) == {0, 1, 2}


def test_stored_records_pass_through_unchanged(tmp_path):
    videos = world.plan(world.WorldSettings(train_videos=3, heldout_videos=1))
    settings = world_text.TextSettings(groups=1)
    conversations = list(world_text.main_conversations(videos, settings))
    datasets.write_splits(tmp_path, {"main": conversations})
    batches = take(loader.stream(datasets.open_split(tmp_path, "main"), 0, 4), 4)
    found = [conversation for batch in batches for conversation in batch]
    by_id = {conversation.id: conversation for conversation in conversations}
    assert {conversation.id: conversation for conversation in found} == by_id


def test_checkpoints_can_store_the_iterator():
    assert isinstance(loader.stream(range(3), 0, 1), grain.DatasetIterator)


@pytest.mark.parametrize(("source", "batch"), [([], 1), ([1], 0)])
def test_impossible_streams_are_refused(source, batch):
    with pytest.raises(ValueError, match=f"{len(source)} records in batches of {batch}"):
        loader.stream(source, 0, batch)


def test_batches_are_announced_ahead_and_come_in_order():
    announced = []
    ahead = loader.Ahead(loader.stream(range(40), 0, 4), 3, announced.append)
    expected = take(loader.stream(range(40), 0, 4), 8)
    for n in range(4):
        assert next(ahead) == expected[n]
        assert announced == expected[: n + 4]
    unannounced = loader.Ahead(loader.stream(range(40), 0, 4), 0, announced.append)
    assert take(unannounced, 8) == expected


def test_a_state_does_not_depend_on_batches_read_ahead():
    def fresh():
        return loader.Ahead(loader.stream(range(23), 3, 4), 3, lambda batch: None)

    first = fresh()
    start = json.loads(json.dumps(first.get_state()))
    everything = take(first, 30)
    for count in (1, 5, 9):
        stream = fresh()
        take(stream, count)
        state = json.loads(json.dumps(stream.get_state()))
        resumed = fresh()
        take(resumed, 2)
        resumed.set_state(state)
        expected = everything[count : count + 20]
        assert take(resumed, 20) == expected
        assert take(stream, 20) == expected
    first.set_state(start)
    assert take(first, 30) == everything


def test_a_negative_depth_is_refused():
    with pytest.raises(ValueError, match="-1 batches"):
        loader.Ahead(loader.stream(range(4), 0, 1), -1, lambda batch: None)
