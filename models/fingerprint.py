"""Fingerprints of weights on devices: equal bits have equal fingerprints, on any mesh."""

from __future__ import annotations

import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped, UInt32

from models.lora import cast


def fingerprint(*states: Any, dtype: DTypeLike | None = None) -> int:
    """Return a number from 0 to 2^32 - 1 that depends on every bit of some weights, and on their
    names.

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


@jax.jit
def array_fingerprints(arrays: dict[str, Array]) -> dict[str, UInt32[Array, ""]]:
    """Return a number for each array that depends on every bit of it; random keys may be typed."""
    return {name: _of_array(array) for name, array in arrays.items()}


def host_fingerprint(x: np.ndarray) -> int:
    """Return what `array_fingerprints` returns, of an array in the memory of the host."""
    size = min(x.dtype.itemsize, 4)
    bits = np.ascontiguousarray(x).reshape(-1).view(f"uint{8 * size}").astype(np.uint32)
    factors = 2 * np.arange(bits.size, dtype=np.uint32) + 1
    return int((bits * factors).sum(dtype=np.uint32))


def _of_array(x: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """Return the sum over all numbers of their bits times an odd number that depends on their
    index.

    Sums of integers do not depend on their order, so neither does the result on the sharding.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    index = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        stride = math.prod(x.shape[axis + 1 :]) % 2**32
        index += jnp.uint32(stride) * jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)
