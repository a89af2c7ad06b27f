"""Objects below one address of Google Cloud Storage, such as gs://bucket/runs/mine.

A write replaces an object as a whole, and every later read or listing sees it. There is no rename,
no append and no lock, but a write can demand that the object has a certain generation, a number
that grows with each write. Reads and writes are verified by the store's checksums.

Requests that fail for a moment are repeated with growing pauses, for up to `PATIENCE` seconds.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from paravt_jax.data.any_path import require_client
from paravt_jax.processes.exit_codes import TEMPORARY

PATIENCE = 300.0
"""Seconds after which a request that fails again and again ends the run."""
ABSENT = 0
"""The generation of an object that does not exist."""

_THREADS = 8
_REQUEST = 60.0  # seconds until a server without an answer counts as failed

T = TypeVar("T")


class BucketError(OSError):
    """The store refused, or could not be reached; the message is one line."""


class OutageError(BucketError):
    """The store could not be reached."""

    exit_code = TEMPORARY


class ChangedError(BucketError):
    """The object has another generation than the write demanded."""


class DamagedObjectError(BucketError):
    """The content of an object does not have its checksum."""


class Stored(NamedTuple):
    """An object as the store lists it."""

    bytes: int
    crc32c: str
    """Its checksum, CRC-32C in base64, which the store computed when it received the object."""


class Bucket:
    """Objects below an address. Names are relative to it.

    Args:
        address: gs://BUCKET/FOLDER.
        patience: Seconds for which failed requests are repeated; None: `PATIENCE`.

    Raises:
        BucketError: There are no credentials.
        ModuleNotFoundError: The package for it is missing.
    """

    def __init__(self, address: str | os.PathLike[str], patience: float | None = None):
        self.address = os.fspath(address).rstrip("/")
        require_client(self.address)
        # An extra, and slow to import.
        from google.cloud import storage
        from google.cloud.storage.retry import DEFAULT_RETRY

        name, _, prefix = self.address.removeprefix("gs://").partition("/")
        self._prefix = f"{prefix}/"
        patience = PATIENCE if patience is None else patience
        self._options: dict[str, Any] = {
            "retry": DEFAULT_RETRY.with_timeout(patience),
            "timeout": min(_REQUEST, patience),
        }
        with self._in_one_line(""):
            # Any: Google's packages have wrong types.
            self._bucket: Any = storage.Client().bucket(name)

    def list(self, prefix: str = "") -> dict[str, Stored]:
        """All objects whose names begin with `prefix`, in the order of their names."""
        with self._in_one_line(prefix):
            found = self._bucket.list_blobs(prefix=self._prefix + prefix, **self._options)
            # A name with a slash at its end stands for a folder that a person made.
            return {
                blob.name.removeprefix(self._prefix): Stored(int(blob.size), blob.crc32c)
                for blob in found
                if not blob.name.endswith("/")
            }

    def read(self, name: str) -> tuple[bytes, int]:
        """The content of an object, and its generation.

        Raises:
            FileNotFoundError: There is none.
        """
        while True:
            with self._in_one_line(name):
                blob = self._bucket.get_blob(self._prefix + name, **self._options)
            if blob is None:
                raise FileNotFoundError(f"{self.address}/{name}: no such object")
            generation = int(blob.generation)
            # Otherwise the content could be that of a newer generation.
            options = self._options | {"if_generation_match": generation}
            with contextlib.suppress(ChangedError), self._in_one_line(name):
                return blob.download_as_bytes(**options), generation

    def read_to(self, name: str, file: str | os.PathLike[str]) -> None:
        """Write the content of an object to a local file, which appears when it is complete."""
        unfinished = f"{os.fspath(file)}.tmp"
        with self._in_one_line(name):
            self._blob(name).download_to_filename(unfinished, **self._options)
        os.replace(unfinished, file)

    def verify(self, name: str) -> None:
        """Read an object, and compare its content with the store's checksum.

        Raises:
            FileNotFoundError: There is none.
            DamagedObjectError: They differ.
        """
        with self._in_one_line(name), open(os.devnull, "wb") as nowhere:
            self._blob(name).download_to_file(nowhere, **self._options)

    def write(self, name: str, content: str | bytes, generation: int | None = None) -> int:
        """Replace the content of an object; returns its new generation.

        Args:
            name: The object.
            content: Its new content.
            generation: Write only if this is its generation (`ABSENT`: if there is none).

        Raises:
            ChangedError: It has another generation.
        """
        blob = self._blob(name)
        options = self._options | {"if_generation_match": generation}
        with self._in_one_line(name):
            blob.upload_from_string(content, content_type="application/octet-stream", **options)
        return int(blob.generation or ABSENT)

    def write_from(self, name: str, file: pathlib.Path) -> None:
        """Replace the content of an object by that of a local file."""
        with self._in_one_line(name):
            self._blob(name).upload_from_filename(file, **self._options)

    def copy(self, name: str, source: Bucket, source_name: str) -> None:
        """Copy an object of another address within the store."""
        blob = source._blob(source_name)
        with self._in_one_line(name):
            token, _, _ = self._blob(name).rewrite(blob, **self._options)
            while token is not None:
                token, _, _ = self._blob(name).rewrite(blob, token=token, **self._options)

    def delete(self, name: str, generation: int | None = None) -> None:
        """Delete an object, if it exists and has the generation.

        Raises:
            ChangedError: It has another generation.
        """
        options = self._options | {"if_generation_match": generation}
        with contextlib.suppress(FileNotFoundError), self._in_one_line(name):
            self._blob(name).delete(**options)

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._prefix + name)

    @contextlib.contextmanager
    def _in_one_line(self, name: str) -> Iterator[None]:
        """Turn errors of Google's packages into those of this module."""
        import requests
        from google.api_core import exceptions
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.storage.exceptions import DataCorruption

        where = f"{self.address}/{name}"
        bucket = self.address.removeprefix("gs://").partition("/")[0]
        try:
            yield
        except exceptions.PreconditionFailed as error:
            raise ChangedError(f"{where}: another process has written it") from error
        except exceptions.NotFound as error:
            raise FileNotFoundError(
                f"{where}: no such object, or there is no bucket {bucket}"
            ) from error
        except exceptions.Forbidden as error:
            raise BucketError(
                f"{where}: no permission ({_cause(error)}); these credentials need the role "
                f"roles/storage.objectUser and storage.buckets.get on {bucket}"
            ) from error
        except (GoogleAuthError, exceptions.Unauthorized) as error:
            raise BucketError(
                f"{where}: no credentials; run gcloud auth application-default "
                "login, or give the virtual machine a service account"
            ) from error
        except DataCorruption as error:
            raise DamagedObjectError(f"{where}: damaged: its checksum is wrong") from error
        except (exceptions.GoogleAPIError, requests.RequestException) as error:
            raise OutageError(
                f"{where}: the store cannot be reached ({_cause(error)}); the same command "
                "continues from the last checkpoint"
            ) from error


def on_each(work: Callable[[T], object], items: Iterable[T]) -> None:
    """Call `work` on several items at a time. Raises the first error."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(work, items):
            pass


def _cause(error: Exception) -> str:
    """The error in one line of at most 200 characters."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return line if len(line) <= 200 else f"{line[:200]} ..."
