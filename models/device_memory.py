"""How many bytes programs may use on a device, and on its host; how the host reuses them."""

from __future__ import annotations

import ctypes
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

# Files with the limit of a container, in versions 2 and 1 of cgroups.
MEMORY_LIMITS = tuple(
    pathlib.Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory/memory.limit_in_bytes")
)
# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
_ARENA_MAX = -8


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
    # Large buffers come from the heap, never from mmap: freeing a mapping returns it at once.
    mallopt(_MMAP_MAX, 0)
    # The heap never shrinks.
    mallopt(_TRIM_THRESHOLD, -1)
    # All threads share one heap, so that each can reuse what another has freed.
    mallopt(_ARENA_MAX, 1)
