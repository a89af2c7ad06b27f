"""Fingerprints of weights on devices: equal bits have equal fingerprints, on any mesh."""

from __future__ import annotations

import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped, UInt32

from models.lora import cast


def fingerprint(*states: Any, dtype: DTypeLike | None = None) -> int:
    """A number from 0 to 2^32 - 1 that depends on every bit of some weights, and on their names.

    It is the sum of the fingerprints of the states, modulo 2^32. If a single number changes, it
    changes. On several hosts, every process of the weights' mesh has to call this.

    Args:
        states: Weights in nnx states with different names.
        dtype: The type to which the weights are cast first (`models.lora.cast`); None: none.
    """
    return sum(int(_of_state(state, dtype)) for state in states) % 2**32


@functools.partial(jax.jit, static_argnames="dtype")
def _of_state(state: Any, dtype: DTypeLike | None) -> UInt32[Array, ""]:
    total = jnp.uint32(0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = zlib.crc32(jax.tree_util.keystr(path).encode())
        total += jnp.uint32(name | 1) * _of_array(leaf if dtype is None else cast(leaf, dtype))
    return total


def _of_array(x: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """The sum over all numbers of their bits times an odd number that depends on their place.

    Sums of integers do not depend on their order, so neither does the result on the sharding.
    """
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        stride = math.prod(x.shape[axis + 1 :]) % 2**32
        place += jnp.uint32(stride) * jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)
