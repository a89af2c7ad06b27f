"""Compiles programs before they are called, several at a time.

JAX keeps what `jitted.lower(...).compile()` made. A later call of `jitted` with arguments of the
same shapes, types and shardings uses it, and does not compile again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

from models.device_memory import host_memory
from models.sharding import Lowering
from paravt_jax.progress import Progress

# Compiling a program of the 8B model for TPU takes up to this many bytes (docs/scale.md).
_COMPILE_BYTES = 3e9


def compile_ahead(lowerings: Iterable[Lowering], shown: bool = True) -> None:
    """Compile programs in threads; XLA releases Python's lock while it compiles.

    Programs that are compiled already take no time.

    Args:
        lowerings: The programs. Those that take longest should come first.
        shown: Whether to show progress.

    Raises:
        JaxRuntimeError: A program cannot be compiled; for example, it needs too much memory.
    """
    began = time.monotonic()
    pool = ThreadPoolExecutor(compile_threads())
    try:
        # Tracing is Python code, so threads would not make it faster. Meanwhile, the threads
        # compile what is traced already.
        compiling = [pool.submit(lower().compile) for lower in lowerings]
        with Progress("compile", "program", shown=shown) as progress:
            for done, future in enumerate(as_completed(compiling), 1):
                future.result()
                if time.monotonic() - began > 1:
                    progress.update(done, len(compiling))
    finally:
        pool.shutdown(cancel_futures=True)


def compile_threads() -> int:
    """Return how many programs to compile at a time.

    One per core, as far as half of the host's memory suffices. The other half is for weights,
    frames and the compiled programs.
    """
    most = int(host_memory() / 2 / _COMPILE_BYTES)
    return max(1, min(os.cpu_count() or 1, most))
