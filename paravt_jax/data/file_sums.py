"""Checksums of a folder's files, which tell damaged files from sound ones.

    FOLDER/sums.json    {"state/d/1f0a": {"bytes": 7663, "crc32": 2769471837}, ...}

They belong to files that never change. CRC-32 finds every flipped bit and every damaged stretch of
up to 32 bits, and misses one in 2^32 of all other damages. It is no protection against forgery.
"""

from __future__ import annotations

import json
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from paravt_jax.data.atomic import write_atomically

SUMS = "sums.json"

_BLOCK = 1 << 20  # bytes read at once
# More threads than this are no faster on the disks that we know.
_MOST_THREADS = 16

T = TypeVar("T")
Sums = dict[str, dict[str, int]]


class DamagedSumsError(ValueError):
    """The file of sums is damaged itself."""


def write_sums(folder: pathlib.Path, files: Iterable[pathlib.Path] | None = None) -> None:
    """Write the sums of files below a folder.

    Args:
        folder: Gets the file of sums.
        files: The files; None: all that are there.
    """
    if files is None:
        files = [file for file in folder.rglob("*") if file.is_file() and file.name != SUMS]
    ordered = sorted(files)
    names = [file.relative_to(folder).as_posix() for file in ordered]
    sums = dict(zip(names, _in_threads(_sum_of, ordered), strict=True))
    write_atomically(folder / SUMS, json.dumps(sums))


def read_sums(folder: pathlib.Path) -> Sums | None:
    """The sums of a folder; None if it has none, because an earlier version wrote it.

    Raises:
        DamagedSumsError: The file of sums is damaged.
    """
    try:
        sums = json.loads((folder / SUMS).read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise DamagedSumsError(f"{SUMS}: not JSON") from error
    if not isinstance(sums, dict) or not all(map(_is_sum, sums.values())):
        raise DamagedSumsError(f"{SUMS}: holds no sums")
    return sums


def find_damage(folder: pathlib.Path, sums: Sums, names: Sequence[str] | None = None) -> list[str]:
    """What is wrong with the files of a folder, one text per file; [] if they are sound.

    Args:
        folder: The folder that `sums` belongs to.
        sums: Its sums.
        names: The files to read; None: all of them.
    """
    chosen = sorted(sums) if names is None else names
    # A wrong length needs no reading.
    damage = {name: _wrong_length(folder / name, sums[name]["bytes"]) for name in chosen}
    whole = [name for name in chosen if not damage[name]]
    found = _in_threads(_sum_or_none, [folder / name for name in whole])
    for name, sum_found in zip(whole, found, strict=True):
        if sum_found != sums[name]:
            damage[name] = "checksum is wrong"
    return [f"{name}: {what}" for name, what in damage.items() if what]


def _is_sum(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"bytes", "crc32"}
        and all(isinstance(number, int) for number in value.values())
    )


def _wrong_length(file: pathlib.Path, length: int) -> str:
    try:
        found = file.stat().st_size
    except OSError:
        return "missing"
    return "" if found == length else f"{found} bytes instead of {length}"


def _in_threads(make: Callable[[pathlib.Path], T], files: Sequence[pathlib.Path]) -> list[T]:
    """Calls `make` on the files in threads; returns the results in their order."""
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    # Reading and zlib release Python's global lock.
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(make, files))


def _sum_of(file: pathlib.Path) -> dict[str, int]:
    length = 0
    crc = 0
    block = memoryview(bytearray(_BLOCK))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(block):
            crc = zlib.crc32(block[:count], crc)
            length += count
    return {"bytes": length, "crc32": crc}


def _sum_or_none(file: pathlib.Path) -> dict[str, int] | None:
    """The sum of a file; None if it cannot be read, as from a bad sector."""
    try:
        return _sum_of(file)
    except OSError:
        return None
