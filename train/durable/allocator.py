"""Tells glibc to keep freed memory, which speeds up XLA and torch on CPU.

XLA on CPU allocates its buffers anew for every call. By default glibc returns large buffers to the
kernel, and the kernel zeroes every page that it hands out again. That can cost more time than the
computation itself.
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
_ARENA_MAX = -8


def reuse_freed_memory() -> None:
    """Make glibc reuse freed memory in this process. Changes speed only; a no-op without glibc."""
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
