"""What programs may use: the memory of a device and of its host, and the types of a GPU."""

from __future__ import annotations

import ctypes
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# Files with the limit of a container, in versions 2 and 1 of cgroups.
MEMORY_LIMITS = tuple(
    pathlib.Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory/memory.limit_in_bytes")
)
# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8
# In bytes: the largest threshold for mmap that glibc allows.
_LARGE_BUFFER = 2**25
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_SHARE = "0.9"
# GPUs before Ampere have no arithmetic in bfloat16, and no flash attention in cuDNN.
_LEAST_CAPABILITY = (8, 0)


def host_memory() -> float:
    """Return the bytes of memory that the processes of this host may use."""
    limits = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    # A container may have less than the machine.
    for file in MEMORY_LIMITS:
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            limits.append(float(text))
    return min(limits)


def reported_memory(device: Any) -> float | None:
    """Return the bytes that programs may use on a device, as JAX reports them; None if it does
    not."""
    if device.platform == "cpu":
        # The devices of a CPU share the memory of their host.
        return host_memory() / jax.local_device_count()
    # On GPUs this is what the allocator may use.
    reported = device.memory_stats()
    if not reported or "bytes_limit" not in reported:
        return None
    return float(reported["bytes_limit"])


def used_memory(devices: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the bytes in use now, and at most since the process began, of each device that counts
    them.

    The devices of a CPU do not.
    """
    counts = [device.memory_stats() or {} for device in devices]
    return [
        (count["bytes_in_use"], count["peak_bytes_in_use"])
        for count in counts
        if "bytes_in_use" in count and "peak_bytes_in_use" in count
    ]


def reuse_freed_memory() -> None:
    """Make glibc reuse freed memory in this process. Changes speed only; a no-op without glibc.

    XLA on CPU allocates its buffers anew for every call. By default glibc returns large buffers to
    the kernel, and the kernel zeroes every page that it hands out again. That can cost more time
    than the computation itself.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    # Buffers below 32 MiB come from the heap. Larger ones are mapped, and freeing returns them at
    # once: on the heap they would leave gaps that the next ones do not fit.
    mallopt(_MMAP_THRESHOLD, _LARGE_BUFFER)
    # The heap never shrinks.
    mallopt(_TRIM_THRESHOLD, -1)
    # All threads share one heap, so that each can reuse what another has freed.
    mallopt(_ARENA_MAX, 1)


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
