"""The counter of compilations: a new shape counts, a known one does not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from train.durable.compilations import Compilations


def test_every_new_shape_is_counted_and_nothing_else():
    program = jax.jit(lambda x: jnp.tanh(x) * 3 + 1)
    counter = Compilations()
    program(np.zeros(5, np.float32))
    first = counter.count
    assert first >= 1
    program(np.ones(5, np.float32))
    assert counter.count == first
    program(np.zeros(6, np.float32))
    assert counter.count == first + 1


def test_counting_starts_with_the_counter():
    jax.jit(lambda x: x * 5)(np.zeros(7, np.float32))
    assert Compilations().count == 0
