"""Unpacks archives of media: zip, tar and tar.gz, whole or split into parts.

Archives come from strangers. One is refused, and nothing of it is kept, if a name in it leaves the
folder or occurs twice, if it has links or a password, or if it grows far beyond its size. It is
unpacked as a whole into a hidden folder, and its files get their places when all of them are sound.
Then it is marked as unpacked, so that the next call skips it.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import hashlib
import io
import itertools
import os
import pathlib
import re
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from paravt_jax.data import foreign

PATTERNS = ("*.zip", "*.tar", "*.tar.gz", "*.tgz", "*.zip.*", "*.tar.*", "*.tgz.*")
"""Patterns of the names of archives and of their parts."""

_WHOLE = re.compile(r".+\.(?:zip|tar|tar\.gz|tgz)", re.IGNORECASE)
# The end of a part's name: .001, .part00, .part.aa, -aa ...
_PART = re.compile(
    r"(?P<whole>.+\.(?:zip|tar|tar\.gz|tgz))[._-]?(?:part)?[._-]?(?:\d{1,4}|[a-z]{2,3})",
    re.IGNORECASE,
)
_MARKS = ".unpacked"
_UNFINISHED = ".unpacking"
# Videos hardly shrink in an archive, texts to a tenth. An archive that grows more is an attack.
_MOST_GROWTH = 50
_ALWAYS_ALLOWED = 2**20  # bytes
_BLOCK = 2**20
_TAR_BLOCK = 512
_TAR_END = bytes(2 * _TAR_BLOCK)


class ArchiveError(ValueError):
    """An archive cannot be unpacked, or must not be; the message names it and the remedy."""


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
    """Return the archives among some files, in the order of their names.

    Args:
        sizes: Bytes of the files by relative path.
        joined: Patterns of files that are parts although their names do not say so. All files that
            match one pattern make one archive, in the order of the numbers in their names.
    """
    found: list[tuple[str, list[str]]] = []
    slices: dict[str, list[str]] = {}
    for name in sorted(sizes, key=_natural):
        pattern = next((pattern for pattern in joined if fnmatchcase(name, pattern)), None)
        part = _PART.fullmatch(name)
        if pattern is not None:
            slices.setdefault(pattern, []).append(name)
        elif _WHOLE.fullmatch(name):
            found.append((name, [name]))
        elif part is not None:
            slices.setdefault(part["whole"], []).append(name)
    found += slices.items()
    return [
        Archive(name, tuple(parts), sum(sizes[part] for part in parts))
        for name, parts in sorted(found, key=lambda named: _natural(named[1][0]))
    ]


def _natural(name: str) -> tuple[list[str | int], str]:
    """Return a key that sorts 2 before 10."""
    pieces = re.split(r"(\d+)", name)
    return [int(piece) if n % 2 else piece for n, piece in enumerate(pieces)], name


def mark_of(archive: Archive, root: pathlib.Path) -> pathlib.Path:
    """Return the file that exists once the archive has been unpacked to `root`."""
    identity = hashlib.sha256(f"{archive.name}\n{archive.size}".encode()).hexdigest()[:16]
    return root / _MARKS / f"{pathlib.PurePosixPath(archive.parts[0]).name[:100]}-{identity}"


def unpack(archive: Archive, source: pathlib.Path, root: pathlib.Path) -> None:
    """Unpack an archive into a folder, unless it was unpacked there before.

    Only one process may do this in a folder at a time.

    Args:
        archive: The archive.
        source: The folder to which its paths are relative.
        root: Where to unpack it.

    Raises:
        ArchiveError: It is damaged or must not be unpacked.
        OSError: The disk is full or cannot be written.
    """
    mark = mark_of(archive, root)
    if mark.exists():
        return
    temporary = root / _UNFINISHED
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir(parents=True)
    try:
        with _named_errors(source / archive.name), _Joined(source, archive.parts) as parts:
            guard = _Guard(root, archive.size)
            with io.BufferedReader(parts, _BLOCK) as stream:
                if archive.name.lower().endswith(".zip"):
                    _extract_zip(stream, temporary, guard)
                else:
                    _extract_tar(stream, temporary, guard)
            if not guard.files:
                raise ArchiveError("it holds no file")
            shutil.copytree(temporary, root, copy_function=os.replace, dirs_exist_ok=True)
        # After a power failure, the mark must not exist without the files.
        os.sync()
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _named_errors(path: pathlib.Path) -> Iterator[None]:
    """Turn all errors that an archive can cause into one line that names it."""
    try:
        yield
    except ArchiveError as error:
        raise ArchiveError(f"{path}: {error}; it is kept, and not unpacked") from error
    # Broad because damaged archives find errors of every kind in the libraries.
    except Exception as error:
        # Errors of the disk have a number; those of gzip's format have none.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = foreign.shortened(error, 200) or type(error).__name__
        raise ArchiveError(
            f"{path}: cannot be unpacked ({reason}); delete it and download it again"
        ) from error


class _Guard:
    """Refuses members of an archive before they are written."""

    def __init__(self, root: pathlib.Path, size: int):
        self._root = root
        self._room = _MOST_GROWTH * size + _ALWAYS_ALLOWED
        self.files: set[pathlib.Path] = set()

    def check(self, name: str, size: int, is_file: bool, is_folder: bool) -> None:
        """Count a member of this size in bytes.

        Raises:
            ArchiveError: It must not be written.
        """
        target = inside(self._root, name)
        if not is_file and not is_folder:
            raise ArchiveError(f"{name} is a link or a device, which could lead anywhere")
        self._room -= size + _TAR_BLOCK
        if self._room < 0:
            raise ArchiveError(
                f"it unpacks to more than {_MOST_GROWTH} times its size; check it, and unpack it "
                "yourself if it is right"
            )
        if target in self.files:
            raise ArchiveError(f"it holds {name} twice")
        if is_file:
            self.files.add(target)


def inside(root: pathlib.Path, name: str) -> pathlib.Path:
    """Join a relative name to the root.

    Raises:
        ArchiveError: The name would leave the root, or names no file.
    """
    path = pathlib.PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ArchiveError(f"{name} would be written outside {root}")
    return root / path


def _extract_zip(stream: io.BufferedIOBase, folder: pathlib.Path, guard: _Guard) -> None:
    with zipfile.ZipFile(stream) as file:
        for member in file.infolist():
            if member.flag_bits & 1:
                raise ArchiveError(f"{member.filename} is encrypted; unpack it yourself")
            is_file = not member.is_dir() and not stat.S_ISLNK(member.external_attr >> 16)
            guard.check(member.filename, member.file_size, is_file, member.is_dir())
        # A member ends at the size that it declares, and its checksum is verified.
        file.extractall(folder)


def _extract_tar(stream: io.BufferedIOBase, folder: pathlib.Path, guard: _Guard) -> None:
    def checked(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        guard.check(member.name, member.size, member.isfile(), member.isdir())
        return tarfile.data_filter(member, path)

    zipped = stream.read(2) == b"\x1f\x8b"
    stream.seek(0)
    with tarfile.open(fileobj=stream, mode="r:gz" if zipped else "r:") as file:
        file.extractall(str(folder), filter=checked)
        assert file.fileobj is not None
        if zipped:
            # The checksum of gzip is behind the last byte.
            while file.fileobj.read(_BLOCK):
                pass
            return
        # tarfile takes the end of the file, and a damaged header, for the end of the archive.
        file.fileobj.seek(file.offset)
        if file.fileobj.read(len(_TAR_END)) != _TAR_END:
            raise ArchiveError(
                f"it is cut off or damaged after {file.offset} bytes; delete it and download it "
                "again"
            )


class _Joined(io.RawIOBase):
    """The parts of an archive as one file."""

    def __init__(self, folder: pathlib.Path, names: Sequence[str]):
        paths = [folder / name for name in names]
        for path in paths:
            target = os.path.realpath(path)
            if not foreign.is_inside(target, folder):
                raise ArchiveError(
                    f"{path}: a link to {target}, outside the folder; copy the archive there"
                )
        self._starts = [0, *itertools.accumulate(path.stat().st_size for path in paths)]
        self._files = [path.open("rb") for path in paths]
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._starts[-1]}[whence]
        if base + offset < 0:
            raise ValueError("it ends before it begins")
        self._at = base + offset
        return self._at

    def readinto(self, buffer) -> int:
        number = bisect.bisect_right(self._starts, self._at) - 1
        if number == len(self._files):
            return 0
        file = self._files[number]
        file.seek(self._at - self._starts[number])
        count = file.readinto(buffer)
        self._at += count
        return count

    def close(self) -> None:
        for file in self._files:
            file.close()
        super().close()
