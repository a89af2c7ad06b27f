"""Shared by all kernels: masks, the platform to compile for, what attention saves."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Int

# `checkpoint_name` of outputs and log-sum-exps. If a remat policy saves this name, the backward
# pass does not repeat the forward pass of attention.
SAVED = "attention"


class Masks(NamedTuple):
    """What hides keys besides causality; None: nothing does. `attention.attend` explains each."""

    segments: Int[Array, "b t"] | None = None
    prefix: Bool[Array, "p s"] | None = None
    starts: Int[Array, "b t"] | None = None
    shared: Int[Array, " b"] | None = None


def platform() -> str:
    """The platform that the code being traced will run on: "tpu", "gpu" or "cpu".

    It is the platform of the current mesh, which may describe another machine (to compile ahead of
    time). Without a mesh it is the default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
