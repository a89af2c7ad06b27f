"""Files of one source of data: in a local folder, on the Hugging Face hub or in a bucket.

They can be listed, opened by ranges without a download, and fetched into a local folder.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import huggingface_hub

from paravt_jax.data import hub
from paravt_jax.data.archives import OpenedFile, inside
from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.media_files import open_bucket

# Bytes of a request that fetches a part of a file.
_BLOCK = 2**24
# Bytes of a request for a file that is read by ranges.
_RANGE = 2**20
# Fields that tell versions of a file apart, by the file systems' names for them; the best first.
_MARKS = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "created")


@runtime_checkable
class RemoteFiles(Protocol):
    """The files of a source.

    Attributes:
        sizes: Bytes of the files by relative name.
    """

    sizes: Mapping[str, int]

    def open(self, name: str) -> OpenedFile:
        """Open a file to read ranges of it. Reading raises errors of many kinds."""
        ...

    def fetch(self, names: Iterable[str], folder: pathlib.Path) -> pathlib.Path:
        """Make files available under their names, and return the folder that holds them.

        A repeated call continues an interrupted one.

        Args:
            names: The files.
            folder: Where to put them, unless they are on a local disk already.

        Raises:
            OSError: They cannot be fetched; the message is one line with the remedy.
        """
        ...


class LocalFiles:
    """The files below a local folder."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        files = (file for file in folder.rglob("*") if file.is_file())
        self.sizes: Mapping[str, int] = {
            file.relative_to(folder).as_posix(): file.stat().st_size for file in files
        }

    def open(self, name: str) -> OpenedFile:
        return (self._folder / name).open("rb")

    def fetch(self, names: Iterable[str], folder: pathlib.Path) -> pathlib.Path:
        return self._folder


class HubFiles:
    """The files of a data set on the hub, at the newest revision.

    Raises:
        FileNotFoundError, ConnectionError: As in `hub.data_set_files`.
    """

    def __init__(self, id: str):
        self._id = id
        listing = hub.data_set_files(id)
        self._revision = listing.revision
        self.sizes: Mapping[str, int] = listing.sizes

    def open(self, name: str) -> OpenedFile:
        system = huggingface_hub.HfFileSystem()
        path = f"datasets/{self._id}/{name}"
        return cast(OpenedFile, system.open(path, revision=self._revision, block_size=_RANGE))

    def fetch(self, names: Iterable[str], folder: pathlib.Path) -> pathlib.Path:
        hub.download(self._id, self._revision, names, folder)
        return folder


class BucketFiles:
    """The files below a bucket path.

    Raises:
        FileNotFoundError: There is no such folder, or it has no files.
        ConnectionError: It does not answer. The messages name the remedy.
        ModuleNotFoundError: This kind of bucket needs another package.
    """

    def __init__(self, address: str):
        self._address = address
        self._system, top = open_bucket(address)
        self._top = top.rstrip("/")
        # With `detail` this is a dict of file information by path. Broad because every file system
        # raises errors of its own kinds.
        try:
            self._system.invalidate_cache()
            found: Any = self._system.find(self._top, detail=True)
        except Exception as error:
            raise failure(error)(
                f"{address}: cannot be listed ({one_line(error)}); check the path and the "
                "credentials"
            ) from error
        if not found:
            raise FileNotFoundError(f"{address}: no such folder, or an empty one; check the path")
        self.sizes: Mapping[str, int] = {
            os.path.relpath(path, self._top).replace(os.sep, "/"): info["size"]
            for path, info in found.items()
        }

    def open(self, name: str) -> OpenedFile:
        return cast(OpenedFile, self._system.open(self._path(name), "rb", block_size=_RANGE))

    def fetch(self, names: Iterable[str], folder: pathlib.Path) -> pathlib.Path:
        for name in names:
            self._fetch(name, inside(folder, name))
        return folder

    def version(self, name: str) -> str:
        """Identifies the content of a file: its size, and its ETag, checksum or time.

        Raises:
            FileNotFoundError: The bucket does not have it.
            ConnectionError: The bucket does not answer.
        """
        try:
            # A listing may be old, and may have other fields than the answer about one file.
            self._system.invalidate_cache()
            info: Any = self._system.info(self._path(name))
        except Exception as error:
            raise failure(error)(
                f"{self._address}: {name} cannot be read ({one_line(error)}); check the credentials"
            ) from error
        mark = next((info[field] for field in _MARKS if info.get(field) is not None), "")
        return f"{info['size']} bytes, {mark}"

    def _path(self, name: str) -> str:
        return f"{self._top}/{name}"

    def _fetch(self, name: str, target: pathlib.Path) -> None:
        """Copy a file, block by block. An interrupted copy is continued if the file is the same.

        A file gets its name only when it is complete. Its version is noted beside it, and a file of
        the right size and version is kept.
        """
        size = self.sizes[name]
        version = self.version(name)
        noted = target.with_name(f".{target.name}.version")
        is_here = target.is_file() and target.stat().st_size == size
        if is_here and noted.is_file() and noted.read_text(encoding="utf-8") == version:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(version.encode()).hexdigest()[:16]
        unfinished = target.with_name(f".{digest}.{target.name[:100]}.partial")
        with unfinished.open("ab") as copy:
            while (at := copy.tell()) < size:
                copy.write(self._block(name, at, min(size, at + _BLOCK)))
            copy.flush()
            os.fsync(copy.fileno())
        if unfinished.stat().st_size != size or self.version(name) != version:
            unfinished.unlink()
            raise ConnectionError(
                f"{self._address}: {name} changed while it was fetched; repeat the command"
            )
        # An old file must not pass for the new version.
        target.unlink(missing_ok=True)
        write_atomically(noted, version)
        os.replace(unfinished, target)

    def _block(self, name: str, start: int, end: int) -> bytes:
        try:
            block: Any = self._system.cat_file(self._path(name), start=start, end=end)
        except Exception as error:
            raise ConnectionError(
                f"{self._address}: {name} cannot be read ({one_line(error)}); check the "
                "credentials and the network, and repeat the command, which goes on"
            ) from error
        if len(block) != end - start:
            raise ConnectionError(f"{self._address}: {name} was cut off; repeat the command")
        return block


def failure(error: Exception) -> type[OSError]:
    """How to report an error of a file system: as a mistake, or as what may work the next time."""
    if isinstance(error, FileNotFoundError | PermissionError | ValueError):
        return FileNotFoundError
    return ConnectionError


def one_line(error: Exception) -> str:
    """An error in one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
