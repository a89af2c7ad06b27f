"""Unpacks zip archives of media.

Archives come from strangers. One is refused, and nothing of it is kept, if a name in it leaves the
folder, if it has links or a password, or if it grows far beyond its size. It is unpacked as a whole
into a hidden folder, and its files are moved out when all of them are sound. Then it is marked as
unpacked, so that the next call skips it.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
import stat
import zipfile

from paravt_jax.data import foreign
from paravt_jax.data.frames import is_inside

SUFFIX = ".zip"
"""Ending of the names of archives."""

# Videos hardly shrink in an archive, texts to a tenth. An archive that grows more is an attack.
_MOST_GROWTH = 50
_ALWAYS_ALLOWED = 2**20  # bytes


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
    """Extract an archive; all members are checked before one is written."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        for member in members:
            inside(folder, member.filename)
            if stat.S_ISLNK(member.external_attr >> 16):
                raise ArchiveError(f"{member.filename} is a link")
        # A member ends at the size that it declares, and its checksum is verified.
        size = sum(member.file_size for member in members)
        if size > _MOST_GROWTH * path.stat().st_size + _ALWAYS_ALLOWED:
            raise ArchiveError(f"it unpacks to more than {_MOST_GROWTH} times its size")
        archive.extractall(folder)
    if not any(file.is_file() for file in folder.rglob("*")):
        raise ArchiveError("it holds no file")
