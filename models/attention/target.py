"""Where what is traced will run."""

from __future__ import annotations

import jax


def platform() -> str:
    """Where what is traced now will run: "tpu", "gpu" or "cpu".

    That of the mesh in context, which may be a topology that this machine lacks; else of the default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
