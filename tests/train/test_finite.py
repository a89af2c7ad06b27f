"""Numbers that are not finite are found wherever they are, and named."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from models.sharding import make_mesh
from train.durable.checkpoint import not_finite


def state() -> dict:
    sharded = NamedSharding(make_mesh(1, jax.device_count(), 1), PartitionSpec("fsdp"))
    return {
        "text": {"q": jax.device_put(jnp.ones((jax.device_count(), 3)), sharded)},
        "half": jnp.ones(4, jnp.bfloat16),
        "tower": np.ones(4, ml_dtypes.bfloat16),
        "key": jax.random.key(0),
        "step": jnp.int32(2**31 - 1),
        "none": jnp.zeros((0,)),
        "largest": jnp.finfo(jnp.float32).max * jnp.ones(2),
    }


def test_a_sound_state_has_none():
    assert not_finite(state()) == ""


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["text.q", "half", "tower"])
def test_one_number_is_enough(name, bad):
    broken = state()
    if name == "tower":
        broken["tower"][-1] = bad
    elif name == "half":
        broken["half"] = broken["half"].at[-1].set(bad)
    else:
        broken["text"]["q"] = broken["text"]["q"].at[-1, -1].set(bad)
    assert not_finite(broken) == name
