"""Unpacks archives of media: zip, tar and tar.gz.

Archives come from strangers. One is refused, and nothing of it is kept, if a name in it leaves the
folder or occurs twice, if it has links or a password, or if it grows far beyond its size. It is
unpacked as a whole into a hidden folder, and its files get their places when all of them are sound.
Then it is marked as unpacked, so that the next call skips it.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import os
import pathlib
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterator

from paravt_jax.data import foreign
from paravt_jax.data.frames import is_inside

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz")
"""Endings of the names of archives."""

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


def mark_of(name: str, size: int, root: pathlib.Path) -> pathlib.Path:
    """Return the file that exists once an archive of this size in bytes has been unpacked."""
    identity = hashlib.sha256(f"{name}\n{size}".encode()).hexdigest()[:16]
    return root / _MARKS / f"{pathlib.PurePosixPath(name).name[:100]}-{identity}"


def unpack(name: str, source: pathlib.Path, root: pathlib.Path) -> None:
    """Unpack an archive into a folder, unless it was unpacked there before.

    Only one process may do this in a folder at a time.

    Args:
        name: Path of the archive in `source`.
        source: The folder that it belongs to.
        root: Where to unpack it.

    Raises:
        ArchiveError: It is damaged or must not be unpacked.
        OSError: The disk is full or cannot be written.
    """
    path = source / name
    target = os.path.realpath(path)
    if not is_inside(target, source):
        raise ArchiveError(
            f"{path}: a link to {target}, outside the folder; copy the archive there"
        )
    size = path.stat().st_size
    mark = mark_of(name, size, root)
    if mark.exists():
        return
    temporary = root / _UNFINISHED
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir(parents=True)
    try:
        with _named_errors(path):
            guard = _Guard(root, size)
            if name.lower().endswith(".zip"):
                _extract_zip(path, temporary, guard)
            else:
                _extract_tar(path, temporary, guard)
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
        # Errors of the disk have a number. Those of gzip's format have none, and a damaged zip
        # makes zipfile seek to before its start.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
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


def _extract_zip(path: pathlib.Path, folder: pathlib.Path, guard: _Guard) -> None:
    with zipfile.ZipFile(path) as file:
        for member in file.infolist():
            if member.flag_bits & 1:
                raise ArchiveError(f"{member.filename} is encrypted; unpack it yourself")
            is_file = not member.is_dir() and not stat.S_ISLNK(member.external_attr >> 16)
            guard.check(member.filename, member.file_size, is_file, member.is_dir())
        # A member ends at the size that it declares, and its checksum is verified.
        file.extractall(folder)


def _extract_tar(path: pathlib.Path, folder: pathlib.Path, guard: _Guard) -> None:
    def checked(member: tarfile.TarInfo, place: str) -> tarfile.TarInfo | None:
        guard.check(member.name, member.size, member.isfile(), member.isdir())
        return tarfile.data_filter(member, place)

    with tarfile.open(path) as file:
        file.extractall(str(folder), filter=checked)
        assert file.fileobj is not None
        if isinstance(file.fileobj, gzip.GzipFile):
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
