"""The small files of a run in a bucket, and the local folder in which the run works on them.

A run reads and writes its local folder. `push` brings what changed to the bucket, `pull` makes the
folder equal to the bucket. files.json, which is written after the files, names those of the run:
`pull` ignores others. So a kill during a push never leaves half of a folder, such as `model`.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import fsspec.core

from paravt_jax.data.any_path import any_path, is_bucket
from paravt_jax.data.archives import ArchiveError, inside
from paravt_jax.data.stored import DamagedFileError, parse_json
from paravt_jax.processes.exit_codes import TEMPORARY, UserError, one_line

MANIFEST = "files.json"
_REMEDY = "restore it from a backup, or start anew with another --run-dir"
# Checkpoints and compiled programs are in the bucket only. The others belong to one machine.
_ELSEWHERE = ("checkpoints", "compiled")
# In the errors of Google's packages and tensorstore, which have many types.
_REFUSALS = ("Forbidden", "PERMISSION_DENIED", "DefaultCredentialsError")


class BucketError(OSError):
    """The store refused, or could not be reached; the message is one line."""


class OutageError(BucketError):
    """The store could not be reached."""

    exit_code = TEMPORARY


def open_store(address: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of an address such as gs://bucket/run, and the path in it.

    Raises:
        ModuleNotFoundError: The package for the address is missing.
    """
    return fsspec.core.url_to_fs(str(any_path(address)))


@contextlib.contextmanager
def named_errors(address: str) -> Iterator[None]:
    """Raise errors of the store in the block as BucketError, but for FileExistsError."""
    try:
        yield
    except (UserError, BucketError, DamagedFileError, FileExistsError, ModuleNotFoundError):
        raise
    # Broad, because gcsfs and Orbax raise errors of many packages.
    except Exception as error:
        if not is_bucket(address):
            raise
        cause = one_line(error)
        is_refusal = isinstance(error, FileNotFoundError | PermissionError)
        is_refusal |= getattr(error, "code", None) in (401, 403)
        if is_refusal or any(word in cause for word in _REFUSALS):
            raise BucketError(
                f"{address}: refused ({cause}); check the name, run gcloud auth "
                "application-default login, or give these credentials the role "
                "roles/storage.objectUser and storage.buckets.get on the bucket"
            ) from error
        raise OutageError(
            f"{address}: the store cannot be reached ({cause}); the same command continues from "
            "the last checkpoint"
        ) from error


class BucketFiles:
    """The small files below an address, and their local copy.

    Args:
        address: gs://BUCKET/FOLDER.
        folder: The local folder.
    """

    def __init__(self, address: str, folder: pathlib.Path):
        self._address = address.rstrip("/")
        self._folder = folder
        # The local files that are equal to those in the bucket: time of the last change in ns, and
        # bytes.
        self._equal: dict[str, tuple[int, int]] = {}
        with named_errors(self._address):
            self._store, self._top = open_store(self._address)

    def pull(self, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Make the local folder equal to the bucket.

        An object that somebody deleted is like a file that somebody deleted.

        Args:
            wanted: Whether to fetch the file of a name.

        Raises:
            DamagedFileError: The list of files is damaged.
            BucketError: The store cannot be reached.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        with named_errors(self._address):
            names = [name for name in self._names() if wanted(name)]
            self._store.get(self._remote(names), self._local(names))
        self._equal = self._files()

    def push(self) -> None:
        """Bring the changes of the local folder to the bucket.

        Raises:
            BucketError: The store cannot be reached or written to.
        """
        files = self._files()
        changed = [name for name in files if files[name] != self._equal.get(name)]
        gone = [name for name in self._equal if name not in files]
        with named_errors(self._address):
            if changed:
                self._store.put(self._local(changed), self._remote(changed))
            if files.keys() != self._equal.keys():
                manifest = json.dumps(sorted(files), indent=0).encode()
                self._store.pipe_file(f"{self._top}/{MANIFEST}", manifest)
            if gone:
                self._store.rm(self._remote(gone))
        self._equal = files

    def _names(self) -> list[str]:
        """Return the names of the run's files that are in the bucket."""
        stored = {path.removeprefix(f"{self._top}/") for path in self._store.find(self._top)}
        if MANIFEST not in stored:
            return []
        # Any: fsspec says that it may be text.
        content: Any = self._store.cat_file(f"{self._top}/{MANIFEST}")
        names = parse_json(content, f"{self._address}/{MANIFEST}", list[str], _REMEDY)
        try:
            # Whoever can write to the bucket must not write elsewhere on this machine.
            for name in names:
                inside(self._folder, name)
        except ArchiveError as error:
            raise DamagedFileError(f"{self._address}/{MANIFEST}: {error}; {_REMEDY}") from error
        return [name for name in names if name in stored]

    def _remote(self, names: list[str]) -> list[str]:
        return [f"{self._top}/{name}" for name in names]

    def _local(self, names: list[str]) -> list[str]:
        return [str(self._folder / name) for name in names]

    def _files(self) -> dict[str, tuple[int, int]]:
        """Return the local files that belong to the bucket, too."""
        files = {}
        for file in self._folder.rglob("*"):
            name = file.relative_to(self._folder)
            # Hidden and .tmp: not complete yet.
            unfinished = any(one.startswith(".") or one.endswith(".tmp") for one in name.parts)
            if not unfinished and name.parts[0] not in _ELSEWHERE and file.is_file():
                status = file.stat()
                files[name.as_posix()] = (status.st_mtime_ns, status.st_size)
        return files
