"""The counter of compilations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from train.durable.usage import Compilations


def test_every_new_shape_counts_and_nothing_else():
    program = jax.jit(lambda x: jnp.tanh(x) * 3 + 1)
    program(np.zeros(7, np.float32))
    counter = Compilations()
    assert counter.count == 0, "what was compiled before does not count"
    program(np.zeros(5, np.float32))
    first = counter.count
    assert first >= 1
    program(np.ones(5, np.float32))
    assert counter.count == first
    program(np.zeros(6, np.float32))
    assert counter.count == first + 1
