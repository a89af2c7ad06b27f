"""What all kernels know: where what is traced will run, and the name of what a backward pass needs of attention."""

from __future__ import annotations

import jax

SAVED = "attention"  # `jax.ad_checkpoint.checkpoint_name` of outputs and log-sum-exps: a policy that saves them computes no score again


def platform() -> str:
    """Where what is traced now will run: "tpu", "gpu" or "cpu".

    That of the mesh in context, which may be a topology that this machine lacks; else of the default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
