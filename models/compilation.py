"""Compiles programs before they are called, several at a time, and keeps them on disk.

JAX keeps what `jitted.lower(...).compile()` made. A later call of `jitted` with arguments of the
same shapes, types and shardings uses it, and does not compile again.

On disk, they are for the next start, which loads them instead of compiling. The cache is JAX's own.
A program's key covers its code, the versions of JAX and XLA, compiler flags and the devices, for a
CPU also its instruction set. A program that is loaded is the same code, so results do not change.
On a GPU, JAX also keeps there which kernels XLA chose by trying them (autotuning), operation by
operation: most of the time of compiling. A program that has changed tries its new operations only.
If the variable JAX_COMPILATION_CACHE_DIR is set, JAX uses that folder and nothing here applies; if
it is empty, nothing is kept.
"""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import filelock
import jax
from tqdm import tqdm

from models.devices import host_memory
from models.sharding import Lowering
from paravt_jax.data.any_path import AnyPath, is_bucket, user_folder
from paravt_jax.processes import hosts

# Compiling a program of the 8B model for TPU takes up to this many bytes (docs/scale.md).
_COMPILE_BYTES = 3e9
MOST_BYTES = 4 * 10**9
"""Size limit of the folder. The programs that were not used for the longest time leave first."""

_SECONDS = 0.1  # programs that compile faster are not kept: reading them would take as long

# Names of files in JAX's folder (jax/_src/lru_cache.py).
_LOCK = ".lockfile"
_PROGRAM = "-cache"
_LAST_USE = "-atime"


def compile_ahead(lowerings: Iterable[Lowering], shown: bool = True) -> list[tuple[str, float]]:
    """Compile programs in threads; XLA releases Python's lock while it compiles.

    Programs that are compiled already take no time.

    Args:
        lowerings: The programs. Those that take longest should come first.
        shown: Whether to show progress: the program that was compiled last, and its seconds.

    Returns:
        The name of each program, and the seconds that compiling it took beside the others, in the
        order in which they ended.

    Raises:
        JaxRuntimeError: A program cannot be compiled; for example, it needs too much memory.
    """
    pool = ThreadPoolExecutor(compile_threads())
    compiled: list[tuple[str, float]] = []
    try:
        # Tracing is Python code, so threads would not make it faster. Meanwhile, the threads
        # compile what is traced already.
        compiling = {
            pool.submit(_seconds_of, lower().compile): program_name(lower) for lower in lowerings
        }
        finished = as_completed(compiling)
        count = len(compiling)
        with tqdm(finished, "compile", count, unit="program", delay=1, disable=not shown) as bar:
            for future in bar:
                name, seconds = compiling[future], future.result()
                compiled.append((name, seconds))
                bar.set_postfix_str(f"{name}: {seconds:.0f} s", refresh=False)
    finally:
        pool.shutdown(cancel_futures=True)
    return compiled


def _seconds_of(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def program_name(lowering: Any) -> str:
    """Return the name of a program: its function, and the shapes of its tokens and pages."""
    program = lowering.func.__self__
    words = [getattr(program, "jitted", program).__name__.strip("_")]
    for argument in lowering.args:
        for array in ("ids", "tables"):
            if hasattr(argument, array):
                words.append(array + " " + "x".join(map(str, getattr(argument, array).shape)))
    return " ".join(words)


class Compilations:
    """Counts the compilations of this process since it was created.

    A program that is loaded from disk counts as well.
    """

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1


def compile_threads() -> int:
    """Return how many programs to compile at a time.

    One per core, as far as half of the host's memory suffices. The other half is for weights,
    frames and the compiled programs.
    """
    most = int(host_memory() / 2 / _COMPILE_BYTES)
    return max(1, min(os.cpu_count() or 1, most))


def use_cache(shared: AnyPath | None = None) -> None:
    """Keep compiled programs from now on, and use those that earlier processes kept.

    They are in the user's cache folder, which all runs share. Several processes use a folder that
    all of them see; only the first one writes there. In a bucket it has no limit of size, because
    JAX cannot lock it.

    A folder that cannot be written to is reported, and nothing is kept.

    Args:
        shared: A folder that all processes see, needed if there are several.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    if shared is not None and is_bucket(shared) and hosts.process_count() > 1:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _SECONDS)
        jax.config.update("jax_compilation_cache_dir", str(shared / "compiled"))
        return
    try:
        parent = user_folder() if shared is None or hosts.process_count() == 1 else shared
        folder = pathlib.Path(parent / "compiled").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        remove_unfinished(folder)
    except OSError as error:
        print(
            f"compiled programs are not kept: their folder cannot be used ({error}); "
            "name another one with JAX_COMPILATION_CACHE_DIR",
            file=sys.stderr,
        )
        return
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _SECONDS)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def remove_unfinished(folder: pathlib.Path) -> None:
    """Remove what a process that was killed while it wrote has left.

    JAX writes a program, then the time of its last use. It neither repairs a program that was cut
    off, nor removes one whose time is missing.

    Raises:
        filelock.Timeout: Another process holds the lock for ten seconds.
    """
    with filelock.FileLock(folder / _LOCK, timeout=10):
        for program in folder.glob(f"*{_PROGRAM}"):
            name = program.name.removesuffix(_PROGRAM)
            if not program.with_name(name + _LAST_USE).exists():
                program.unlink()
