"""Checksums of a folder's files, which tell damaged files from sound ones.

    FOLDER/sums.json    {"checksum": 3519214577,
                        "state/d/1f0a": {"bytes": 7663, "crc32": [2769471837]}, ...}

They belong to files that never change; the first line is the checksum of the others. A file has one
CRC-32 per 64 MiB. It finds every flipped bit and every damaged stretch of up to 32 bits, and misses
one in 2^32 of all other damages. It is no protection against forgery.
"""

from __future__ import annotations

import itertools
import math
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from typing_extensions import TypedDict

from paravt_jax.data.stored_json import DamagedFileError, read_checked_json, write_checked_json

SUMS = "sums.json"

_PIECE = 64 << 20  # bytes per checksum
_BLOCK = 1 << 20  # bytes read at once
_MOST_THREADS = 16


class Sum(TypedDict):
    """Length of a file, and the checksums of its pieces."""

    bytes: int
    crc32: list[int]


Sums = dict[str, Sum]


def write_sums(folder: pathlib.Path, files: Iterable[pathlib.Path]) -> None:
    """Write the sums of files below a folder.

    Args:
        folder: Gets the file of sums.
        files: The files.
    """
    ordered = sorted(files)
    names = [file.relative_to(folder).as_posix() for file in ordered]
    sums = dict(zip(names, _sums_of(ordered, _crc), strict=True))
    write_checked_json(folder / SUMS, sums)


def seal(folder: pathlib.Path) -> list[str]:
    """Write the sums of a complete folder; if it has sums, say what is wrong with its files.

    Returns:
        As `find_damage`.

    Raises:
        DamagedFileError: The file of sums is damaged.
    """
    sums = read_sums(folder)
    if sums is not None:
        return find_damage(folder, sums)
    write_sums(folder, [file for file in folder.rglob("*") if file.is_file()])
    return []


def require_sealed(folder: pathlib.Path, remedy: str) -> None:
    """Write the sums of a complete folder; if it has sums, verify its files.

    Raises:
        DamagedFileError: A file has changed.
    """
    damage = seal(folder)
    if damage:
        raise DamagedFileError(f"{folder}/{damage[0]}; {remedy}")


def read_sums(folder: pathlib.Path) -> Sums | None:
    """The sums of a folder; None if it has none, because an earlier version wrote it.

    Raises:
        DamagedFileError: The file of sums is damaged.
    """
    try:
        return read_checked_json(folder / SUMS, Sums, "the files beside it cannot be verified")
    except FileNotFoundError:
        return None


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
    found = _sums_of([folder / name for name in whole], _crc_if_readable)
    for name, sum_found in zip(whole, found, strict=True):
        if sum_found != sums[name]:
            damage[name] = "checksum is wrong"
    return [f"{name}: {what}" for name, what in damage.items() if what]


def _wrong_length(file: pathlib.Path, length: int) -> str:
    try:
        found = file.stat().st_size
    except OSError:
        return "missing"
    return "" if found == length else f"{found} bytes instead of {length}"


def _sums_of(
    files: Sequence[pathlib.Path], crc: Callable[[tuple[pathlib.Path, int]], int]
) -> list[Sum]:
    """The sums of files, in their order; `crc` gets a file and the start of a piece."""
    lengths = [file.stat().st_size for file in files]
    pieces = [
        (file, start)
        for file, length in zip(files, lengths, strict=True)
        for start in range(0, length, _PIECE)
    ]
    # Reading and zlib release Python's global lock.
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        crcs = iter(list(pool.map(crc, pieces)))
    return [
        {"bytes": length, "crc32": list(itertools.islice(crcs, math.ceil(length / _PIECE)))}
        for length in lengths
    ]


def _crc(piece: tuple[pathlib.Path, int]) -> int:
    file, start = piece
    crc = 0
    block = memoryview(bytearray(_BLOCK))
    with file.open("rb") as stream:
        stream.seek(start)
        for _ in range(_PIECE // _BLOCK):
            count = stream.readinto(block)
            if not count:
                break
            crc = zlib.crc32(block[:count], crc)
    return crc


def _crc_if_readable(piece: tuple[pathlib.Path, int]) -> int:
    """The checksum of a piece; -1, which is none, if it cannot be read, as from a bad sector."""
    try:
        return _crc(piece)
    except OSError:
        return -1
