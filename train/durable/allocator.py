"""What glibc does with memory that was freed: it keeps it, once `reuse_freed_memory` was called.

XLA on CPU asks for its buffers anew at every call. By default glibc gives large ones back, and the kernel clears fresh pages, which
costs more than what is computed in them; so it is with torch.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of glibc's malloc.h


def reuse_freed_memory() -> None:
    """For this process and from now on. Changes speed only; elsewhere than with glibc nothing happens."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    for parameter, value in (
        (_MMAP_MAX, 0),
        (_TRIM_THRESHOLD, -1),
        (_ARENA_MAX, 1),
    ):  # nothing is mapped by itself, nothing given back
        mallopt(parameter, value)
