"""Media files on a local disk, or behind an fsspec address such as gs://bucket/clip.mp4.

Files behind addresses are read by ranges, never copied. They must not change while a process reads
them: their identity is asked for once per process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterator
from typing import Any

import fsspec
import fsspec.core

from paravt_jax.data.frames import VideoError, is_address, without_scheme

# Bytes that each seek in a remote file fetches at once, and each read after those are used up.
_RANGE = 2**18
# The fsspec package for each scheme of addresses.
_PACKAGES = {
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "s3": "s3fs",
    "az": "adlfs",
    "abfs": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
}


def open_bucket(address: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of an address, and the path in it.

    Raises:
        ModuleNotFoundError: The scheme needs a package that is not installed.
        FileNotFoundError: fsspec does not know the scheme.
    """
    scheme = address.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(address)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        # For other schemes, fsspec's message names the package.
        needed = f"{package}: pip install {package}" if package else f"a package ({error})"
        raise ModuleNotFoundError(
            f"{address}: {scheme}:// paths need {needed}, or copy the files and give their folder"
        ) from error
    except ValueError as error:
        raise FileNotFoundError(
            f"{address}: {error}; give an address that fsspec supports (gs://..., s3://...), a "
            "folder or a hub id"
        ) from error


def identity(path: str | os.PathLike) -> str:
    """What identifies the content of a file: its size, and its modification time or its like.

    Raises:
        VideoError: There is no such file, it is empty, or it cannot be opened.
        ModuleNotFoundError: As in `open_bucket`.
    """
    if is_address(path):
        return _remote_identity(os.fspath(path))
    try:
        status = os.stat(without_scheme(path))
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        # ValueError: the name contains a NUL.
        raise VideoError(path, "no such file") from error
    except OSError as error:
        # For example, the name is too long, or the folder is not readable.
        reason = f"it cannot be opened ({error.strerror}); check the path and its permissions"
        raise VideoError(path, reason) from error
    if not stat.S_ISREG(status.st_mode):
        raise VideoError(path, "no such file")
    _require_content(path, status.st_size)
    return f"{status.st_size} bytes, {status.st_mtime_ns} ns"


# Asking takes a round trip to the bucket or two, and features ask for every frame.
@functools.lru_cache(maxsize=2**16)
def _remote_identity(address: str) -> str:
    system, name = open_bucket(address)
    # Broad because every file system raises errors of its own kinds.
    try:
        found: Any = system.info(name)
        mark = system.ukey(name)
    except FileNotFoundError as error:
        raise VideoError(address, "no such file") from error
    except Exception as error:
        reason = f"it cannot be opened ({type(error).__name__}: {error}); check address and access"
        raise VideoError(address, reason) from error
    if found["type"] != "file":
        raise VideoError(address, "no such file")
    _require_content(address, found["size"])
    return f"{found['size']} bytes, {mark}"


def _require_content(path: str | os.PathLike, size: int) -> None:
    if not size:
        raise VideoError(path, "the file is empty")


@contextlib.contextmanager
def opened(path: str | os.PathLike) -> Iterator[Any]:
    """What PyAV and Pillow open: the path of a local file, or a file object that reads ranges."""
    if not is_address(path):
        yield without_scheme(path)
        return
    system, name = open_bucket(os.fspath(path))
    with system.open(name, "rb", block_size=_RANGE) as file:
        yield _Ranges(file)


class _Ranges:
    """A remote file whose errors are OSErrors. Every file system raises some of its own kinds."""

    def __init__(self, file: Any):
        self._file = file
        self.seek = file.seek
        self.tell = file.tell

    def read(self, size: int = -1) -> bytes:
        try:
            return self._file.read(size)
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error


def permanent_name(path: str | os.PathLike) -> str:
    """A name of the file that does not depend on the current folder, nor on links to the file."""
    if is_address(path):
        return os.fspath(path)
    return os.path.realpath(without_scheme(path))
