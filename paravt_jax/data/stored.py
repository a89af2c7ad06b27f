"""Stores what must be found again: atomic writes, JSON with checksums, settings, locks, sums.

Files of a run are written so that a crash never leaves a partial one. Their JSON is checked against
a type: a file that is whole JSON but holds something else, such as `[]` or `3`, ends in one line
that names the file, the field and the remedy. Files that other files are judged by hold a checksum
of themselves in their first line, since a flipped bit in the name of a field could switch off what
the field is for:

    {"checksum": 2769471837,
     "steps": {"sft": ...

Runs, checkpoints, prepared sets, rendered worlds and evaluations can be resumed. Each stores its
settings, and a process with other settings is refused: it would mix two kinds of results.

`sums.json` lists the checksums of a folder's other files, which tell damaged files from sound ones:

    {"checksum": 3519214577,
     "state/d/1f0a": {"bytes": 7663, "crc32": [2769471837]}, ...}

A file has one CRC-32 per 64 MiB. It finds every flipped bit and every damaged stretch of up to 32
bits, and misses one in 2^32 of all other damages. It is no protection against forgery.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

import pydantic
from typing_extensions import TypedDict

# --- atomic writes ---


def write_atomically(file: pathlib.Path, text: str) -> None:
    """Replace the contents of `file` with `text` in UTF-8. Readers see the old text or the new one.

    The text first goes to a file of the same name plus ".tmp" in the same folder, which must exist.
    """
    unfinished = file.with_name(file.name + ".tmp")
    with unfinished.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        # Without the fsync a power cut could leave the new name pointing at an empty file: the
        # rename may reach the disk before the data does.
        os.fsync(stream.fileno())
    os.replace(unfinished, file)


@contextlib.contextmanager
def appearing(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Return a hidden folder to fill. It becomes `folder` if the block succeeds, and is deleted if
    not.

    So `folder` is always complete, even if the process is killed. A killed writer leaves its hidden
    folder behind, which the next writer of the same folder deletes: there must be only one at a
    time.
    """
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        # After a power failure, `folder` must not exist without its contents.
        os.sync()
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextlib.contextmanager
def naming_full_disk(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Name the folder if a disk is full while the block writes to it. Many errors leave it out."""
    try:
        yield
    # RuntimeError: array_record's.
    except (OSError, RuntimeError) as error:
        full = os.strerror(errno.ENOSPC)
        if full not in str(error) or getattr(error, "filename", None):
            raise
        raise OSError(errno.ENOSPC, full, os.fspath(folder)) from error


# --- JSON ---


class DamagedFileError(ValueError):
    """A file of a run does not hold what the run wrote; the message is one line."""


def write_checked_json(
    file: pathlib.Path, content: Mapping[str, Any], indent: int | None = None
) -> None:
    """Write a JSON object with a checksum of itself, atomically."""
    rest = json.dumps(content, indent=indent).removeprefix("{").lstrip("\n") + "\n"
    write_atomically(file, f"{_first_line(rest.encode()).decode()}\n{rest}")


def read_checked_json(file: pathlib.Path, kind: Any, remedy: str) -> Any:
    """Read a file that `write_checked_json` wrote.

    Args:
        file: The file.
        kind: The type of its content; see `parse_json`.
        remedy: What to do about a damaged file.

    Raises:
        OSError: The file cannot be read.
        DamagedFileError: It is damaged, or holds something else.
    """
    return parse_checked_json(file.read_bytes(), str(file), kind, remedy)


def parse_checked_json(content: bytes, name: str, kind: Any, remedy: str) -> Any:
    """Parse what `write_checked_json` wrote; `name` is that of its file. See `parse_json`."""
    first, _, rest = content.partition(b"\n")
    if first != _first_line(rest):
        raise DamagedFileError(f"{name}: damaged: its checksum is wrong; {remedy}")
    return parse_json(b"{" + rest, name, kind, remedy)


def _first_line(rest: bytes) -> bytes:
    return b'{"checksum": %d,' % zlib.crc32(rest)


def parse_json(content: bytes, name: str, kind: Any, remedy: str) -> Any:
    """Parse JSON that a run wrote.

    Args:
        content: What its file holds.
        name: The file, for messages.
        kind: Anything that pydantic knows, such as a `TypedDict`, which may have other keys, too.
        remedy: What to do about a damaged file.

    Raises:
        DamagedFileError: It is no JSON, or not of this type.
    """
    try:
        value = json.loads(content)
    # ValueError: not JSON or not UTF-8. RecursionError: nested too deeply.
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{name}: damaged: not JSON ({error}); {remedy}") from error
    try:
        _adapter(kind).validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DamagedFileError(f"{name}: damaged: {where}: {first['msg']}; {remedy}") from error
    return value


_adapter = functools.cache(pydantic.TypeAdapter)


# --- settings and locks ---

_ABSENT = "(absent)"


def as_json(value: Any) -> Any:
    """Return `value` as JSON reads it back; tuples become lists."""
    return json.loads(json.dumps(value))


def require_same(
    what: str,
    stored: dict[str, Any],
    wanted: dict[str, Any],
    remedy: str,
    error: type[Exception] = ValueError,
) -> None:
    """Raise `error`, with one line per differing field, unless both settings are equal.

    Args:
        what: Start of the message, such as "runs/x holds a run of other settings".
        stored: Settings read from disk.
        wanted: Requested settings, as JSON reads them back.
        remedy: Last line of the message.
        error: Type of the exception.
    """
    changes = differences(stored, wanted).items()
    lines = [f"  {name}: {old} -> {new}" for name, (old, new) in changes]
    if lines:
        raise error("\n".join([f"{what} (stored -> wanted):", *lines, remedy]))


def differences(stored: dict[str, Any], wanted: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the old and the new value of each field that differs, as JSON."""
    old, new = _flat(stored), _flat(wanted)
    pairs = {name: (old.get(name, _ABSENT), new.get(name, _ABSENT)) for name in old | new}
    return {name: (before, after) for name, (before, after) in pairs.items() if before != after}


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Flatten nested dicts to dotted names and JSON texts: {"a": {"b": 1}} gives {"a.b": "1"}."""
    if not isinstance(value, dict) or (prefix and not value):
        # Compare texts, because NaN != NaN. Lists and empty dicts are compared as a whole.
        return {prefix: json.dumps(value)}
    flat: dict[str, str] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return flat


def lock(file: pathlib.Path, wait: bool = False) -> TextIO:
    """Lock `file` until the returned stream is closed. The file is created if it does not exist.

    Args:
        file: The lock file. It contains the id of the process that holds the lock.
        wait: Whether to wait while another process holds the lock.

    Returns:
        An open stream; also usable in a `with` block.

    Raises:
        BlockingIOError: Another process holds the lock, and `wait` is false.
    """
    # "a+" creates a missing file. Unlike "w", it keeps the holder's id until the lock is ours.
    stream = file.open("a+", encoding="utf-8")
    try:
        # The kernel releases the lock when the process ends, so a killed process leaves no stale
        # lock behind.
        fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        stream.seek(0)
        holder = stream.read().strip() or "unknown"
        stream.close()
        raise BlockingIOError(
            f"{file}: in use by another process (id {holder}); wait for it, or stop it"
        ) from error
    # A forked worker inherits the open file, and would keep the lock after its parent has died.
    os.register_at_fork(after_in_child=stream.close)
    stream.truncate(0)
    stream.write(str(os.getpid()))
    stream.flush()
    return stream


# --- sums of files ---

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


def require_undamaged(folder: pathlib.Path, names: Iterable[str]) -> None:
    """Raise DamagedFileError if files of an export are damaged, or their sums.

    Files without sums, such as those of others, are not read.
    """
    file = folder / SUMS
    remedy = f"export the model again, or delete {file} if you changed the files yourself"
    sums: Sums = read_checked_json(file, Sums, remedy) if file.exists() else {}
    summed = [name for name in names if name in sums]
    with ThreadPoolExecutor(_THREADS) as pool:
        damage = [*pool.map(lambda name: _damage(folder / name, sums[name]), summed)]
    for name, what in zip(summed, damage, strict=True):
        if what:
            raise DamagedFileError(f"{folder / name}: {what}; {remedy}")


def _damage(file: pathlib.Path, expected: Sum) -> str:
    try:
        return "" if _sum_of(file) == expected else "checksum is wrong"
    except OSError as error:  # such as a bad sector
        return f"cannot be read ({error.strerror})"


def _sum_of(file: pathlib.Path) -> Sum:
    # Reading and zlib release Python's global lock.
    with file.open("rb") as stream:
        pieces = iter(lambda: stream.read(_PIECE), b"")
        return {"bytes": file.stat().st_size, "crc32": [zlib.crc32(piece) for piece in pieces]}
