"""Objects below one address of Google Cloud Storage, such as gs://bucket/runs/mine.

A write replaces an object as a whole, and every later read or listing sees it. There is no rename,
no append and no lock. Reads and writes are verified by the store's checksums.

Requests that fail for a moment are repeated with growing pauses, for up to `PATIENCE` seconds.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paravt_jax.data.any_path import require_client
from paravt_jax.data.stored_json import DamagedFileError
from paravt_jax.processes.exit_codes import TEMPORARY

PATIENCE = 300.0
"""Seconds after which a request that fails again and again ends the run."""

_THREADS = 8
_REQUEST = 60.0  # seconds until a server without an answer counts as failed


class BucketError(OSError):
    """The store refused, or could not be reached; the message is one line."""


class OutageError(BucketError):
    """The store could not be reached."""

    exit_code = TEMPORARY


class ChangedError(BucketError):
    """An object has another generation than the request demanded."""


class Bucket:
    """Objects below an address. Names are relative to it.

    Args:
        address: gs://BUCKET/FOLDER.

    Attributes:
        options: How requests are repeated: keyword arguments of Google's methods.

    Raises:
        BucketError: There are no credentials.
        ModuleNotFoundError: The package for it is missing.
    """

    def __init__(self, address: str | os.PathLike[str]):
        self.address = os.fspath(address).rstrip("/")
        require_client(self.address)
        # An extra, and slow to import.
        from google.cloud import storage
        from google.cloud.storage.retry import DEFAULT_RETRY

        name, _, folder = self.address.removeprefix("gs://").partition("/")
        self._prefix = f"{folder}/"
        self.options: dict[str, Any] = {
            "retry": DEFAULT_RETRY.with_timeout(PATIENCE),
            "timeout": min(_REQUEST, PATIENCE),
        }
        with self.in_one_line():
            # Any: Google's packages have wrong types.
            self._bucket: Any = storage.Client().bucket(name)

    def blob(self, name: str) -> Any:
        """Return Google's `Blob` of an object, which may not exist."""
        return self._bucket.blob(self._prefix + name)

    def list(self) -> dict[str, Any]:
        """Return all objects as Google's `Blob`s, by name and in the order of their names."""
        with self.in_one_line():
            found = self._bucket.list_blobs(prefix=self._prefix, **self.options)
            # A name with a slash at its end stands for a folder that a person made.
            return {
                blob.name.removeprefix(self._prefix): blob
                for blob in found
                if not blob.name.endswith("/")
            }

    def read(self, name: str) -> bytes:
        """Return the content of an object.

        Raises:
            FileNotFoundError: There is none.
            DamagedFileError: It does not have its checksum.
        """
        with self.in_one_line(name):
            return self.blob(name).download_as_bytes(**self.options)

    def write(self, name: str, content: str) -> None:
        """Replace the content of an object."""
        with self.in_one_line(name):
            self.blob(name).upload_from_string(content, **self.options)

    def download(self, names: Iterable[str], folder: pathlib.Path) -> None:
        """Write objects to local files of the same names, whose folders exist. See `read`."""
        self._on_each(
            names,
            lambda name: self.blob(name).download_to_filename(folder / name, **self.options),
        )

    def verify(self, names: Iterable[str]) -> None:
        """Read objects, and compare their content with their checksums. See `read`."""
        with open(os.devnull, "wb") as nowhere:
            self._on_each(
                names, lambda name: self.blob(name).download_to_file(nowhere, **self.options)
            )

    def upload(self, names: Iterable[str], folder: pathlib.Path) -> None:
        """Replace the content of objects by that of local files of the same names."""
        self._on_each(
            names, lambda name: self.blob(name).upload_from_filename(folder / name, **self.options)
        )

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, if they exist."""
        blobs = [self.blob(name) for name in names]
        with self.in_one_line():
            self._bucket.delete_blobs(blobs, on_error=lambda blob: None, **self.options)

    def copy(self, source: Bucket, last: str) -> None:
        """Copy all objects of another address within the store, the one named `last` at the end."""

        def copy(name: str) -> None:
            original = source.blob(name)
            token, _, _ = self.blob(name).rewrite(original, **self.options)
            while token is not None:
                token, _, _ = self.blob(name).rewrite(original, token, **self.options)

        names = source.list().keys()
        self._on_each(names - {last}, copy)
        self._on_each(names & {last}, copy)

    @contextlib.contextmanager
    def in_one_line(self, name: str = "") -> Iterator[None]:
        """Turn the errors of Google's packages, which have many types, into one line."""
        from google.api_core.exceptions import GoogleAPICallError, NotFound, PreconditionFailed
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.storage.exceptions import DataCorruption

        where = f"{self.address}/{name}"
        bucket = self.address.removeprefix("gs://").partition("/")[0]
        try:
            yield
        except NotFound as error:
            raise FileNotFoundError(
                f"{where}: no such object, or there is no bucket {bucket}"
            ) from error
        except PreconditionFailed as error:
            raise ChangedError(f"{where}: another process has written it") from error
        except DataCorruption as error:
            raise DamagedFileError(f"{where}: damaged: its checksum is wrong") from error
        except Exception as error:
            cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            refused = isinstance(error, GoogleAPICallError) and error.code in (401, 403)
            if refused or isinstance(error, GoogleAuthError):
                raise BucketError(
                    f"{where}: no permission ({cause}); run gcloud auth application-default login, "
                    "or give these credentials the role roles/storage.objectUser and "
                    f"storage.buckets.get on {bucket}"
                ) from error
            raise OutageError(
                f"{where}: the store cannot be reached ({cause}); the same command continues from "
                "the last checkpoint"
            ) from error

    def _on_each(self, names: Iterable[str], work: Callable[[str], object]) -> None:
        """Call `work` with several names at a time; raise the first error."""

        def work_on(name: str) -> None:
            with self.in_one_line(name):
                work(name)

        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(work_on, names):
                pass
