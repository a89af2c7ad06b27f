"""Checksums of a folder's files, which tell damaged files from sound ones.

    FOLDER/sums.json    {"checksum": 3519214577,
                        "state/d/1f0a": {"bytes": 7663, "crc32": [2769471837]}, ...}

They belong to files that never change; the first line is the checksum of the others. A file has one
CRC-32 per 64 MiB. It finds every flipped bit and every damaged stretch of up to 32 bits, and misses
one in 2^32 of all other damages. It is no protection against forgery.
"""

from __future__ import annotations

import pathlib
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from typing_extensions import TypedDict

from paravt_jax.data.stored_json import read_checked_json, write_checked_json

SUMS = "sums.json"

_PIECE = 64 << 20  # bytes per checksum
_THREADS = 4


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
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = dict(zip(names, pool.map(_sum_of, ordered), strict=True))
    write_checked_json(folder / SUMS, sums)


def read_sums(folder: pathlib.Path) -> Sums | None:
    """Return the sums of a folder; None if it has none, such as weights of others.

    Raises:
        DamagedFileError: The file of sums is damaged.
    """
    try:
        return read_checked_json(folder / SUMS, Sums, "the files beside it cannot be verified")
    except FileNotFoundError:
        return None


def find_damage(folder: pathlib.Path, sums: Sums, names: Sequence[str] | None = None) -> list[str]:
    """Return what is wrong with the files of a folder, one text per file; [] if they are sound.

    Args:
        folder: The folder that `sums` belongs to.
        sums: Its sums.
        names: The files to read; None: all of them.
    """
    chosen = sorted(sums) if names is None else names
    with ThreadPoolExecutor(_THREADS) as pool:
        damage = pool.map(lambda name: _damage(folder / name, sums[name]), chosen)
        return [f"{name}: {what}" for name, what in zip(chosen, damage, strict=True) if what]


def _damage(file: pathlib.Path, expected: Sum) -> str:
    try:
        found = file.stat().st_size
    except OSError:
        return "missing"
    # A wrong length needs no reading.
    if found != expected["bytes"]:
        return f"{found} bytes instead of {expected['bytes']}"
    try:
        return "" if _sum_of(file) == expected else "checksum is wrong"
    except OSError:  # such as a bad sector
        return "checksum is wrong"


def _sum_of(file: pathlib.Path) -> Sum:
    # Reading and zlib release Python's global lock.
    with file.open("rb") as stream:
        pieces = iter(lambda: stream.read(_PIECE), b"")
        return {"bytes": file.stat().st_size, "crc32": [zlib.crc32(piece) for piece in pieces]}
