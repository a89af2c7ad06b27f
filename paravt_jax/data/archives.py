"""Unpacks archives of media: zip, tar and tar.gz, whole or split into parts.

Archives come from outside, so nothing about them is trusted: names that leave the target folder,
links, encrypted or damaged archives, archives that grow far beyond their size, and those with too
many files or too deep folders are refused. An archive is marked as unpacked only after all of it
was read and checked. Unpacking can be killed at any moment; the next call keeps the files that are
complete.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import gzip
import hashlib
import io
import lzma
import os
import pathlib
import re
import stat
import struct
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

from paravt_jax.data import foreign

PATTERNS = ("*.zip", "*.tar", "*.tar.gz", "*.tgz", "*.zip.*", "*.tar.*", "*.tgz.*")
"""Patterns of the names of archives and of their parts."""

_WHOLE = re.compile(r".+\.(?:zip|tar|tar\.gz|tgz)", re.IGNORECASE)
# The end of a part's name: .001, .part00, .part.aa, -aa ...
_PART = re.compile(
    r"(?P<whole>.+\.(?:zip|tar|tar\.gz|tgz))[._-]?(?:part)?[._-]?(?P<part>\d{1,4}|[a-z]{2,3})",
    re.IGNORECASE,
)
_MARKS = ".unpacked"
# Videos hardly shrink in an archive, texts to a tenth. An archive that grows more is an attack.
_MOST_GROWTH = 50
_ALWAYS_ALLOWED = 2**20  # bytes
# Every file takes an inode, however small it is. The published archives have thousands of files.
_MOST_MEMBERS = 2_000_000
_MOST_DEPTH = 32  # parts of a path
_BLOCK = 2**20
_DISK_BLOCK = 4096
_ZIP_HEADER = 30  # bytes before the name of a file
_TAR_BLOCK = 512
# A tar ends with two blocks of zeros, and tar fills up its last record with more.
_TAR_END = 2 * _TAR_BLOCK
_MOST_ZEROS = 2**20
_DAMAGED = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
    IndexError,
    KeyError,
)
# Errors of the file system that a member's name causes.
_NAMES = (
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.EINVAL,
    errno.EILSEQ,
)


@runtime_checkable
class OpenedFile(Protocol):
    """A file of bytes that can be read from any place."""

    def read(self, size: int, /) -> bytes: ...

    def seek(self, offset: int, /) -> int: ...

    def close(self) -> None: ...


class ArchiveError(ValueError):
    """An archive cannot be unpacked, or must not be; the message names it and the remedy."""


class _StopError(Exception):
    """Another archive failed, or the caller stops."""


@dataclasses.dataclass(frozen=True)
class Archive:
    """An archive below some folder."""

    name: str
    """Relative path; of parts, without their numbers; or the pattern that they match."""
    parts: tuple[str, ...]
    """Relative paths of its files, in order."""
    size: int
    """Bytes of all parts."""


def find_archives(sizes: Mapping[str, int], joined: Sequence[str] = ()) -> list[Archive]:
    """The archives among some files, in the order of their names.

    Args:
        sizes: Bytes of the files by relative path.
        joined: Patterns of files that are parts although their names do not say so. All files that
            match one pattern make one archive, in the order of the numbers in their names.

    Raises:
        ArchiveError: A part is missing.
    """
    found: list[tuple[str, list[str]]] = []
    slices: dict[str, list[str]] = {}
    numbered: dict[str, dict[str, str]] = {}
    for name in sorted(sizes, key=_natural):
        pattern = next((pattern for pattern in joined if fnmatchcase(name, pattern)), None)
        part = _PART.fullmatch(name)
        if pattern is not None:
            slices.setdefault(pattern, []).append(name)
        elif _WHOLE.fullmatch(name):
            found.append((name, [name]))
        elif part is not None:
            numbered.setdefault(part["whole"], {})[part["part"].lower()] = name
    found += slices.items()
    for whole, parts in numbered.items():
        _require_all_parts(whole, list(parts))
        found.append((whole, list(parts.values())))
    return [
        Archive(name, tuple(parts), sum(sizes[part] for part in parts))
        for name, parts in sorted(found, key=lambda named: _natural(named[1][0]))
    ]


def _natural(name: str) -> tuple[list[str | int], str]:
    """A key that sorts 2 before 10."""
    pieces = re.split(r"(\d+)", name)
    return [int(piece) if n % 2 else piece for n, piece in enumerate(pieces)], name


def _require_all_parts(whole: str, parts: Sequence[str]) -> None:
    """Refuse gaps. A missing last part is noticed when the archive is read."""
    numbers = [_number(part) for part in parts]
    first = 1 if parts[0].isdigit() and numbers[0] == 1 else 0
    if numbers != list(range(first, first + len(numbers))):
        raise ArchiveError(
            f"{whole}: of its parts only {', '.join(parts)} are there; "
            "download the missing ones, too"
        )


def _number(part: str) -> int:
    if part.isdigit():
        return int(part)
    number = 0
    for letter in part:
        number = number * 26 + ord(letter) - ord("a")
    return number


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which files of archives are unpacked, and how much disk they may take."""

    names: Set[str]
    """Relative paths. The other files of an archive are not written."""
    room: int | None = None
    """Upper bound on the bytes that are written on disk; None: no limit."""

    @functools.cached_property
    def digest(self) -> str:
        """Fingerprint of the names."""
        return hashlib.sha256("\n".join(sorted(self.names)).encode()).hexdigest()[:16]


def mark_of(
    archive: Archive, root: pathlib.Path, selection: Selection | None = None
) -> pathlib.Path:
    """The file that exists once the archive, or a selection of it, has been unpacked to `root`."""
    named = f"{archive.name}\n{archive.size}"
    if selection is not None:
        named += f"\n{selection.digest}"
    identity = hashlib.sha256(named.encode()).hexdigest()[:16]
    return root / _MARKS / f"{pathlib.PurePosixPath(archive.parts[0]).name[:100]}-{identity}"


def on_disk(size: int) -> int:
    """Bytes that a file of this size takes on disk: file systems count in blocks of 4 KiB."""
    return -(-size // _DISK_BLOCK) * _DISK_BLOCK


def zip_contents(
    archive: Archive, sizes: Mapping[str, int], open_part: Callable[[str], OpenedFile]
) -> dict[str, int] | None:
    """The sizes in bytes of a zip's files, from its table of contents alone; None: not a zip.

    Args:
        archive: The archive.
        sizes: Bytes of its parts by relative path.
        open_part: Opens a part by its relative path. The errors of reading it are not changed.

    Raises:
        ArchiveError: It has no table of contents.
    """
    if not _is_zip(archive):
        return None
    parts = [(sizes[name], functools.partial(open_part, name)) for name in archive.parts]
    try:
        with _Parts(parts) as raw, zipfile.ZipFile(io.BufferedReader(raw, _BLOCK)) as file:
            return {
                str(pathlib.PurePosixPath(member.filename)): member.file_size
                for member in file.infolist()
                if not member.is_dir()
            }
    except zipfile.BadZipFile as error:
        raise ArchiveError(f"{archive.name}: has no table of contents ({error})") from error


def _is_zip(archive: Archive) -> bool:
    return archive.name.lower().endswith(".zip")


def unpack(
    archives: Iterable[Archive],
    source: pathlib.Path,
    root: pathlib.Path,
    tell: Callable[[int, int], None] | None = None,
    selection: Selection | None = None,
) -> None:
    """Unpack archives into one folder, several at a time. Skips what was unpacked before.

    Args:
        archives: The archives.
        source: The folder to which their paths are relative.
        root: Where to unpack them.
        tell: Called twice a second and at the end with the megabytes that are done, and all. It may
            raise an exception to stop.
        selection: The files to unpack; None: all. Its room is for each archive.

    Raises:
        ArchiveError: An archive is damaged or must not be unpacked.
        OSError: The disk is full or cannot be written, or `selection` has not enough room.
    """
    tasks = [_Unpacking(archive, source, root, selection) for archive in archives]
    total = sum(task.archive.size for task in tasks)
    root.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = {pool.submit(task.run) for task in tasks}
        try:
            while waiting:
                done, waiting = concurrent.futures.wait(
                    waiting, timeout=0.5, return_when=concurrent.futures.FIRST_COMPLETED
                )
                for future in done:
                    future.result()
                if tell is not None:
                    tell(round(sum(task.done for task in tasks) / 1e6), round(total / 1e6))
        # Also for KeyboardInterrupt: leaving the `with` block waits for the other archives.
        except BaseException:
            for task in tasks:
                task.stop.set()
            pool.shutdown(cancel_futures=True)
            raise


@runtime_checkable
class _Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes: ...


class _Unpacking:
    """One archive that is being unpacked in a thread.

    Attributes:
        done: Bytes of the archive that have been worked through.
        stop: Set it to end the thread at the next block.
    """

    def __init__(
        self,
        archive: Archive,
        source: pathlib.Path,
        root: pathlib.Path,
        selection: Selection | None,
    ):
        self.archive = archive
        self.done = 0
        self.stop = threading.Event()
        self._source = source
        self._root = root
        self._selection = selection
        self._mark = mark_of(archive, root, selection)
        self._on_disk = 0
        self._room = _MOST_GROWTH * archive.size + _ALWAYS_ALLOWED
        self._members = 0
        self._files = 0

    def run(self) -> None:
        """Unpack the archive and mark it, unless it is marked."""
        if not self._mark.exists():
            for part in self.archive.parts:
                target = os.path.realpath(self._source / part)
                if not foreign.is_inside(target, self._source):
                    raise ArchiveError(
                        f"{self._source / part}: a link to {target}, outside the folder; copy the "
                        "archive there"
                    )
            paths = [self._source / part for part in self.archive.parts]
            files = [(path.stat().st_size, functools.partial(path.open, "rb")) for path in paths]
            with self._named_errors(), _Parts(files) as parts:
                stream = io.BufferedReader(parts, _BLOCK)
                if _is_zip(self.archive):
                    self._unpack_zip(stream)
                else:
                    self._unpack_tar(stream)
                if not self._files:
                    raise ArchiveError("it holds no file")
            # After a power failure, the mark must not exist without the files.
            os.sync()
            self._mark.parent.mkdir(exist_ok=True)
            self._mark.touch()
        self.done = self.archive.size

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Turn all errors that an archive can cause into one line that names it."""
        path = self._source / self.archive.name
        try:
            yield
        except ArchiveError as error:
            raise ArchiveError(f"{path}: {error}; it is kept, and not unpacked") from error
        except _DAMAGED as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ArchiveError(
                f"{path}: cannot be unpacked ({reason}); delete it and download it again"
            ) from error
        except OSError as error:
            if error.errno not in _NAMES:
                raise
            raise ArchiveError(
                f"{path}: holds a name that cannot be written here ({error}); unpack it yourself"
            ) from error

    def _unpack_zip(self, stream: io.BufferedIOBase) -> None:
        with zipfile.ZipFile(stream) as file:
            _require_apart(file.infolist())
            members = [member for member in file.infolist() if not member.is_dir()]
            for member in members:
                self._reserve(member.file_size)
                if member.flag_bits & 1:
                    raise ArchiveError(
                        f"{member.filename} is encrypted; unpack it yourself with its password"
                    )
                if stat.S_ISLNK(member.external_attr >> 16):
                    raise ArchiveError(f"{member.filename} is a link, which could lead anywhere")
            self._files = len(members)
            for member in members:
                if self._is_selected(member.filename):
                    with file.open(member) as packed:
                        self._write(member.filename, member.file_size, packed)
                self.done = member.header_offset + member.compress_size

    def _unpack_tar(self, stream: io.BufferedIOBase) -> None:
        zipped = stream.read(2) == b"\x1f\x8b"
        stream.seek(0)
        plain = gzip.GzipFile(fileobj=stream) if zipped else stream
        # Headers count, too: a million of empty files takes much more room than its archive.
        counted = _Counted(plain, self._room + _MOST_ZEROS)
        with tarfile.open(fileobj=counted, mode="r|", bufsize=_BLOCK) as file:
            for member in file:
                self._reserve(member.size if member.isfile() else 0)
                if member.isfile():
                    self._files += 1
                    packed = file.extractfile(member)
                    assert packed is not None
                    if self._is_selected(member.name):
                        self._write(member.name, member.size, packed)
                elif not member.isdir():
                    raise ArchiveError(f"{member.name} is a link or a device, not a file")
                self.done = stream.tell()
        # tarfile takes the end of the file, and a damaged header, for the end of the archive.
        while counted.read(_BLOCK):
            self._check_stop()
        zeros = counted.total - file.offset
        if counted.last_content > file.offset or not _TAR_END <= zeros <= _MOST_ZEROS:
            raise ArchiveError(
                f"it is cut off or damaged after {file.offset} bytes; delete it and download it "
                "again"
            )

    def _reserve(self, size: int) -> None:
        self._members += 1
        if self._members > _MOST_MEMBERS:
            raise ArchiveError(
                f"it holds more than {_MOST_MEMBERS:,} files; check it, and unpack it yourself if "
                "it is right"
            )
        self._room -= size + _TAR_BLOCK
        if self._room < 0:
            raise ArchiveError(
                f"it unpacks to more than {_MOST_GROWTH} times its size; check it, and unpack it "
                "yourself if it is right"
            )

    def _is_selected(self, name: str) -> bool:
        selection = self._selection
        return selection is None or str(pathlib.PurePosixPath(name)) in selection.names

    def _require_room(self, size: int) -> None:
        """Raise OSError if another file of this size does not fit into the selection's room."""
        room = None if self._selection is None else self._selection.room
        self._on_disk += on_disk(size)
        if room is not None and self._on_disk > room:
            raise OSError(
                f"{self._source / self.archive.name}: what rows name of it takes more than the "
                f"{room / 1e6:,.0f} MB that are left of --disk; give more"
            )

    def _write(self, name: str, size: int, packed: _Readable) -> None:
        """Write one file under a temporary name first, or compare it if it exists."""
        target = inside(self._root, name)
        if target.exists():
            self._require_same(target, size, packed)
            return
        self._require_room(size)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Short, and different for every archive: two may hold a file of the same name.
        unfinished = target.with_name(f".{self._mark.name[-16:]}.partial")
        written = 0
        try:
            with unfinished.open("wb") as plain:
                while block := packed.read(_BLOCK):
                    self._check_stop()
                    plain.write(block)
                    written += len(block)
            if written != size:
                raise ArchiveError(f"{name} is cut off; delete it and download it again")
            os.replace(unfinished, target)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def _require_same(self, target: pathlib.Path, size: int, packed: _Readable) -> None:
        """Refuse to replace a file. An equal one is left from an interrupted call."""
        same = target.stat().st_size == size
        with target.open("rb") as present:
            while same and (block := packed.read(_BLOCK)):
                self._check_stop()
                same = present.read(len(block)) == block
        if not same:
            raise ArchiveError(
                f"{target} exists with another content: delete it if this archive has the right "
                "one, or unpack this archive yourself, into another folder"
            )

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise _StopError


def _require_apart(members: Sequence[zipfile.ZipInfo]) -> None:
    """Refuse members that share bytes: a small zip can so unpack the same content many times.

    Older versions of zipfile do not check this.
    """
    ordered = sorted(members, key=lambda member: member.header_offset)
    for member, following in zip(ordered, ordered[1:], strict=False):
        end = member.header_offset + _ZIP_HEADER + member.compress_size
        if end > following.header_offset:
            raise ArchiveError(f"{member.filename} and {following.filename} overlap in it")


class _Parts(io.RawIOBase):
    """The parts of an archive as one file."""

    def __init__(self, parts: Sequence[tuple[int, Callable[[], OpenedFile]]]):
        """Takes the size in bytes of each part, and a function that opens it."""
        self._sizes = [size for size, _ in parts]
        self._openers = [opener for _, opener in parts]
        self._at = 0
        self._open: tuple[int, OpenedFile] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: sum(self._sizes)}[whence]
        if base + offset < 0:
            raise ValueError("it ends before it begins")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer) -> int:
        start = 0
        for number, size in enumerate(self._sizes):
            if self._at < start + size:
                file = self._part(number)
                file.seek(self._at - start)
                block = file.read(min(len(buffer), start + size - self._at))
                buffer[: len(block)] = block
                self._at += len(block)
                return len(block)
            start += size
        return 0

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None
        super().close()

    def _part(self, number: int) -> OpenedFile:
        if self._open is None or self._open[0] != number:
            if self._open is not None:
                self._open[1].close()
            self._open = (number, self._openers[number]())
        return self._open[1]


class _Counted(io.BufferedIOBase):
    """A stream that is read from begin to end, with a limit on its length.

    Attributes:
        total: Bytes so far.
        last_content: Where the last byte that is not zero ended.
    """

    def __init__(self, stream: io.BufferedIOBase, limit: int):
        self.total = 0
        self.last_content = 0
        self._stream = stream
        self._limit = limit

    def read(self, size: int | None = -1, /) -> bytes:
        block = self._stream.read(size)
        content = len(block.rstrip(b"\0"))
        if content:
            self.last_content = self.total + content
        self.total += len(block)
        if self.total > self._limit:
            raise ArchiveError(
                f"it unpacks to more than {_MOST_GROWTH} times its size; check it, and unpack it "
                "yourself if it is right"
            )
        return block


def inside(root: pathlib.Path, name: str) -> pathlib.Path:
    """Join a relative name to the root.

    Raises:
        ArchiveError: The name would leave the root, names no file, or is nested too deeply.
    """
    path = pathlib.PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or not path.parts:
        raise ArchiveError(f"{name} would be written outside {root}")
    if len(path.parts) > _MOST_DEPTH:
        raise ArchiveError(
            f"{name[:80]}... is in more than {_MOST_DEPTH} folders inside each other"
        )
    return root / path
