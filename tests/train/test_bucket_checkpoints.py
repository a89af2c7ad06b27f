"""Checkpoints in a bucket: exact, complete or absent, and verified."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.durable.bucket import OutageError
from train.durable.checkpoint import CheckpointError, Checkpoints


def state_of(seed: int) -> dict:
    key = jax.random.key(seed)
    return {
        "w": jax.random.normal(key, (64, 32)),
        "half": jax.random.normal(key, (8,)).astype(jnp.bfloat16),
        "host": np.arange(5) + seed,
    }


def same(one: dict, other: dict) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def saved(folder: str, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.save(step, state_of(step), {"step": step})
    return checkpoints


def test_a_state_comes_back_bit_for_bit_and_the_oldest_leaves(store):
    folder = "gs://bucket/exact/checkpoints/rl"
    saved(folder, 1, 2, 3, 4).close()
    again = Checkpoints(folder)
    assert again.steps() == [3, 4]
    state, meta = again.restore(state_of(0), 4)
    assert meta == {"step": 4}
    assert same(state, state_of(4))
    assert same(Checkpoints(folder, read_only=True).restore(state_of(0), 3)[0], state_of(3))
    assert not store.names("exact/checkpoints/rl/1/")


def newest_arrays(store, folder: str, step: int) -> str:
    """The largest object of a checkpoint's arrays."""
    names = store.names(f"{folder}/{step}/state/")
    return max(names, key=lambda name: len(store.read(name)))


@pytest.mark.parametrize("damage", ["flip", "delete", "overwrite"])
def test_a_damaged_checkpoint_is_refused(store, damage):
    folder = f"{damage}/checkpoints/rl"
    saved(f"gs://bucket/{folder}", 1, 2).close()
    name = newest_arrays(store, folder, 2)
    if damage == "flip":
        store.flip(name)
    elif damage == "delete":
        store.delete(name)
    else:
        store.write(name, store.read(name)[::-1])
    again = Checkpoints(f"gs://bucket/{folder}")
    with pytest.raises(CheckpointError, match=r"gs://.*rl/2 cannot be read .*before it"):
        again.restore(state_of(0), 2)
    assert same(again.restore(state_of(0), 1)[0], state_of(1))


def test_what_a_killed_save_left_is_removed(store):
    folder = "killed/checkpoints/rl"
    saved(f"gs://bucket/{folder}", 1, 2).close()
    # The last write of a save.
    store.delete(f"{folder}/2/commit_success.txt")
    assert Checkpoints(f"gs://bucket/{folder}", read_only=True).steps() == [1]
    again = Checkpoints(f"gs://bucket/{folder}")
    assert again.steps() == [1]
    again.save(3, state_of(3), {})
    again.wait()
    assert not store.names(f"{folder}/2/")
    again.save(2, state_of(2), {})
    again.wait()
    assert same(again.restore(state_of(0), 2)[0], state_of(2))


@pytest.mark.slow
def test_a_save_waits_for_the_store(store):
    folder = "outage/checkpoints/rl"
    saved(f"gs://bucket/{folder}", 1).close()
    again = Checkpoints(f"gs://bucket/{folder}")
    assert again.steps() == [1]
    store.close_for(3.0)
    again.save(2, state_of(2), {})
    again.close()
    assert same(Checkpoints(f"gs://bucket/{folder}").restore(state_of(0), 2)[0], state_of(2))
    with store.outage(), pytest.raises(OutageError, match="the store cannot be reached"):
        Checkpoints(f"gs://bucket/{folder}")
