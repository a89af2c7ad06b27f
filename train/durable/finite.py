"""Finds numbers that are not finite, before a state is saved and after it is read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from paravt_jax.processes import hosts


def not_finite(state: PyTree) -> str:
    """Return the path of an array that has a number that is not finite; "" if there is none.

    All processes call it, and get the same. Sharded arrays stay where they are.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    numbers = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in flat
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    # NumPy arrays would travel to a device first.
    sound = {name: _all_finite(x) for name, x in numbers.items() if isinstance(x, np.ndarray)}
    sound |= _each_finite({name: x for name, x in numbers.items() if name not in sound})
    mine = next((name for name, finite in sound.items() if not finite), "")
    return next((name for name in hosts.gather(mine) if name), "")


def _all_finite(array: np.ndarray) -> bool:
    return bool(np.isfinite(array).all())


@jax.jit
def _each_finite(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return whether all numbers of each array are finite, in one program."""
    return {name: jnp.isfinite(array).all() for name, array in arrays.items()}
