"""Unpacks archives of media: zip, tar and tar.gz.

Archives come from strangers. One is refused, and nothing of it is kept, if a name in it leaves the
folder, if it has links or a password, or if it grows far beyond its size. It is unpacked as a whole
into a hidden folder, and its files are moved out when all of them are sound. Then it is marked as
unpacked, so that the next call skips it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pathlib
import shutil
import stat
import tarfile
import zipfile

from paravt_jax.data import foreign
from paravt_jax.data.frames import is_inside

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz")
"""Endings of the names of archives."""

# Videos hardly shrink in an archive, texts to a tenth. An archive that grows more is an attack.
_MOST_GROWTH = 50
_GROWS = f"it unpacks to more than {_MOST_GROWTH} times its size"
_ALWAYS_ALLOWED = 2**20  # bytes
_HEADER = 512  # bytes of a member's header
_TAR_END = bytes(2 * _HEADER)
_MOST_AT_ONCE = 2**17  # bytes of a read; tarfile copies files in smaller ones
_GZIP = b"\x1f\x8b"


class ArchiveError(ValueError):
    """An archive cannot be unpacked, or must not be; the message names it and the remedy."""


def unpack(name: str, source: pathlib.Path, root: pathlib.Path) -> None:
    """Unpack an archive into a folder, unless it was unpacked there before.

    Only one process may do this in a folder at a time.

    Args:
        name: Path of the archive in `source`.
        source: The folder that it belongs to.
        root: Where to unpack it.

    Raises:
        ArchiveError: It is damaged or must not be unpacked, or the disk is full or cannot be
            written.
    """
    path = source / name
    target = os.path.realpath(path)
    if not is_inside(target, source):
        raise ArchiveError(
            f"{path}: a link to {target}, outside the folder; copy the archive there"
        )
    identity = hashlib.sha256(f"{name}\n{path.stat().st_size}".encode()).hexdigest()[:16]
    mark = root / ".unpacked" / f"{path.name[:100]}-{identity}"
    if mark.exists():
        return
    temporary = root / ".unpacking"
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir(parents=True)
    try:
        _extract(path, temporary)
        shutil.copytree(temporary, root, copy_function=os.replace, dirs_exist_ok=True)
        # After a power failure, the mark must not exist without the files.
        os.sync()
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
    # Broad because damaged archives find errors of every kind in the libraries.
    except Exception as error:
        reason = foreign.shortened(error, 200) or type(error).__name__
        raise ArchiveError(
            f"{path}: cannot be unpacked ({reason}); it is kept: unless {root} cannot be "
            "written or is full, delete it and download it again, or unpack it yourself"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def inside(root: pathlib.Path, name: str) -> pathlib.Path:
    """Join a relative name to the root.

    Raises:
        ArchiveError: The name would leave the root, or names no file.
    """
    path = pathlib.PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ArchiveError(f"{name} would be written outside {root}")
    return root / path


def _extract(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Extract an archive; each member is checked before it is written."""
    most = _MOST_GROWTH * path.stat().st_size + _ALWAYS_ALLOWED

    def check(name: str, is_plain: bool) -> None:
        inside(folder, name)
        if not is_plain:
            raise ArchiveError(f"{name} is a link, a device or a sparse file")

    def checked(member: tarfile.TarInfo, root: str) -> tarfile.TarInfo | None:
        check(member.name, member.isdir() or (member.isfile() and not member.issparse()))
        return tarfile.data_filter(member, root)

    if path.name.lower().endswith(".zip"):
        with zipfile.ZipFile(path) as zipped:
            members = zipped.infolist()
            for member in members:
                check(member.filename, not stat.S_ISLNK(member.external_attr >> 16))
            # A member ends at the size that it declares, and its checksum is verified.
            if sum(_HEADER + member.file_size for member in members) > most:
                raise ArchiveError(_GROWS)
            zipped.extractall(folder)
    else:
        with _TarReader(path, most) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            tar.extractall(str(folder), filter=checked)
            _require_end(tar, file)
    if not any(file.is_file() for file in folder.rglob("*")):
        raise ArchiveError("it holds no file")


class _TarReader(io.BufferedReader):
    """The content of a tar or tar.gz, of at most `most` bytes.

    tarfile reads long names and other additions to a header whole, before a member can be checked.
    """

    def __init__(self, path: pathlib.Path, most: int) -> None:
        with path.open("rb") as file:
            self.is_gzip = file.read(len(_GZIP)) == _GZIP
        super().__init__(gzip.GzipFile(path) if self.is_gzip else io.FileIO(path))
        self.most = most

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MOST_AT_ONCE:
            raise ArchiveError(f"a header in it has more than {_MOST_AT_ONCE} bytes")
        if self.tell() + size > self.most:
            raise ArchiveError(_GROWS)
        return super().read(size)


def _require_end(tar: tarfile.TarFile, file: _TarReader) -> None:
    """Raise an error unless all of a tar was read, and is sound."""
    if file.is_gzip:
        # The checksum of gzip is behind the last byte.
        while file.read1():
            pass
        return
    # tarfile takes the end of the file, and a damaged header, for the end of the archive.
    file.seek(tar.offset)
    if file.read(len(_TAR_END)) != _TAR_END:
        raise ArchiveError(f"it is cut off or damaged after {tar.offset} bytes")
