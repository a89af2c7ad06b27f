"""Keeps compiled programs on disk, so that the next start loads them instead of compiling again.

The cache is JAX's own. A program's key covers its code, the versions of JAX and XLA, compiler flags
and the devices, for a CPU also its instruction set. A program that is loaded is the same code, so
results do not change.

If the variable JAX_COMPILATION_CACHE_DIR is set, JAX uses that folder and nothing here applies; if
it is empty, nothing is kept.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile

import filelock
import jax

from paravt_jax.data.any_path import AnyPath, is_bucket, user_folder
from paravt_jax.processes import hosts

MOST_BYTES = 4 * 10**9
"""Size limit of the folder. The programs that were not used for the longest time leave first."""

_SECONDS = 0.1  # programs that compile faster are not kept: reading them would take as long

# Names of files in JAX's folder (jax/_src/lru_cache.py).
_LOCK = ".lockfile"
_PROGRAM = "-cache"
_LAST_USE = "-atime"


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
    # RuntimeError: the user has no home directory.
    except (OSError, RuntimeError) as error:
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
