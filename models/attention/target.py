"""Shared by all kernels: masks, tiles of packed rows, the platform, what attention saves."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# `checkpoint_name` of outputs and log-sum-exps. If a remat policy saves this name, the backward
# pass does not repeat the forward pass of attention.
SAVED = "attention"


class Masks(NamedTuple):
    """What hides keys besides causality; None: nothing does. `attention.attend` explains each."""

    segments: Int[Array, "b t"] | None = None
    prefix: Bool[Array, "b s"] | None = None
    starts: Int[Array, "b t"] | None = None
    shared: Int[Array, " b"] | None = None


def platform() -> str:
    """The platform that the code being traced will run on: "tpu", "gpu" or "cpu".

    It is the platform of the current mesh, which may describe another machine (to compile ahead of
    time). Without a mesh it is the default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def pad_rows(x: Any, tile: int) -> Array:
    """Fills axis 1, the places of a row, up to whole tiles."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % tile)] + [(0, 0)] * (x.ndim - 2))


def visible_tiles(masks: Masks, queries: int, keys: int) -> Bool[Array, "b i j"]:
    """Which tiles of packed rows, of `queries` queries x `keys` keys, may hold a visible pair.

    The length of a row is a multiple of both sizes. Prompts count by the lowest and highest number
    of the groups in a tile, so the result is exact if groups are numbered in their order. The tile
    of a query's own place always counts: every query, padding too, has at least one key.
    """
    segments, _, starts, shared = masks
    assert segments is not None and starts is not None and shared is not None
    b, t = segments.shape
    valid = segments != 0
    prompt = valid & (jnp.arange(t)[None] < shared[:, None])

    def ends(x: Array, counted: Array, size: int) -> tuple[Array, Array]:
        """Smallest and largest x per tile, of the places that are counted."""
        smallest = jnp.where(counted, x, jnp.iinfo(jnp.int32).max).reshape(b, -1, size).min(-1)
        return smallest, jnp.where(counted, x, -1).reshape(b, -1, size).max(-1)

    first_group, last_group = (x[:, :, None] for x in ends(segments, valid, queries))
    first_prompt, last_prompt = (x[:, None] for x in ends(segments, prompt, keys))
    query = jnp.arange(0, t, queries)[None, :, None]
    key = jnp.arange(0, t, keys)[None, None]
    first_own = jnp.minimum(query, ends(starts, valid, queries)[0][:, :, None])
    prompts = (first_prompt <= last_group) & (first_group <= last_prompt)
    return (key < query + queries) & (prompts | (key + keys > first_own))
