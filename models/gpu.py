"""What a GPU needs: most of its memory for one program, and a type that it computes in."""

from __future__ import annotations

import os
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_SHARE = "0.9"
# GPUs before Ampere have no arithmetic in bfloat16, and no flash attention in cuDNN.
_LEAST_CAPABILITY = (8, 0)


def reserve_memory() -> None:
    """Let JAX take 90 % of a GPU's memory. Has an effect before JAX sees a device, and on GPUs.

    JAX takes this memory at once and serves all arrays and programs from it, so that it does not
    fall into pieces. Its own default is 75 %, which leaves 6 of 24 GB unused. The CUDA context,
    cuBLAS and cuDNN need the rest. A share that the user has set stays. The sizes of a run are
    chosen for the share.
    """
    if not any(os.environ.get(name) for name in _FRACTIONS):
        os.environ[_FRACTIONS[0]] = _SHARE


def require_type(field: str, dtype: DTypeLike, device: Any = None) -> None:
    """Check that a device computes in a type.

    Args:
        field: The setting that names the type, for the message.
        dtype: The type of the activations.
        device: The device; None: the first one here.

    Raises:
        ValueError: The type is bfloat16, and the device is a GPU of CUDA without it.
    """
    if jnp.dtype(dtype) != jnp.bfloat16:
        return
    device = jax.local_devices()[0] if device is None else device
    capability = str(getattr(device, "compute_capability", ""))
    # GPUs of other vendors have names such as gfx90a.
    if device.platform != "gpu" or not re.fullmatch(r"\d+\.\d+", capability):
        return
    major, minor = map(int, capability.split("."))
    if (major, minor) < _LEAST_CAPABILITY:
        raise ValueError(
            f"{field}: bfloat16 on {device.device_kind}, whose compute capability {capability} has "
            "no bfloat16; take a GPU of 8.0 or more (L4, A100, RTX 3090) or a TPU; this one can "
            "train the tiny recipes, which compute in float32"
        )
