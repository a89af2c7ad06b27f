"""Questions to servers, in parallel and within a time limit: the hub, buckets, a judge."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import fnmatch
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import fsspec.core

# With its API, which it imports when it is first used. Two threads must not do that at once: until
# CPython 3.11.8, compiling a module in one can fail in the other.
import huggingface_hub.hf_api
from huggingface_hub import constants, errors
from huggingface_hub.file_download import repo_folder_name

T = TypeVar("T")

REQUEST = 6.0
"""Time limit of one request, in seconds."""


class NoAnswer(Exception):
    """A server did not answer; the message says why."""


class NoAccess(Exception):
    """A repository exists but may not be read, or does not exist for this user."""


@dataclasses.dataclass(frozen=True)
class Repository:
    """Files of a repository of the hub, as the hub lists them."""

    revision: str
    files: dict[str, int]
    """Bytes by name."""
    blobs: dict[str, str]
    """Name in the cache's folder of blobs, by file name."""


class Asked:
    """Asks each question once, in a thread of its own, and waits until one common deadline.

    The threads are daemons. A look-up of a name cannot be interrupted, and must not keep the
    process from ending.
    """

    def __init__(self, limit: float):
        self._limit = limit
        self._deadline = time.monotonic() + limit
        self._lock = threading.Lock()
        self._answers: dict[Any, concurrent.futures.Future[Any]] = {}

    def answer(self, ask: Callable[..., T], *arguments: Any) -> T:
        """Returns `ask(*arguments)`. Raises NoAnswer at the deadline."""
        with self._lock:
            key = (ask, arguments)
            if key not in self._answers:
                self._answers[key] = started(ask, *arguments)
            future = self._answers[key]
        try:
            return future.result(max(0.0, self._deadline - time.monotonic()))
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            raise NoAnswer(f"no answer within {self._limit:.0f} s") from None


def started(work: Callable[..., T], *arguments: Any) -> concurrent.futures.Future[T]:
    """Starts `work` in a daemon thread."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def ask_hub(name: str, kind: str) -> Repository:
    """Asks the hub for the files of a repository, with one attempt per request.

    Args:
        name: The id, owner/name.
        kind: "model" or "dataset".

    Raises:
        NoAnswer: The hub cannot be reached, or must not be (HF_HUB_OFFLINE).
        NoAccess: There is no such repository, it asks for a token or consent, or the token is
            wrong.
    """
    hub = huggingface_hub.HfApi()
    try:
        info: Any = hub.repo_info(name, repo_type=kind, files_metadata=True, timeout=REQUEST)
        if info.gated:
            # The list of a gated repository's files is public, but the files are not.
            hub.auth_check(name, repo_type=kind)
    except errors.GatedRepoError as error:
        raise NoAccess("gated: it asks for consent and a token") from error
    except errors.RepositoryNotFoundError as error:
        raise NoAccess("not on the hub, or private") from error
    except errors.OfflineModeIsEnabled as error:
        raise NoAnswer("not asked, because HF_HUB_OFFLINE is set; unset it") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise NoAccess("the hub does not accept the token") from error
        raise NoAnswer(f"status {status} from {constants.ENDPOINT}") from error
    # The hub's client raises the errors of httpx or of requests, by its version.
    except Exception as error:
        raise NoAnswer(f"no answer from {constants.ENDPOINT} ({type(error).__name__})") from error
    siblings = info.siblings or []
    return Repository(
        revision=info.sha or "",
        files={file.rfilename: file.size or 0 for file in siblings},
        blobs={
            file.rfilename: file.lfs.sha256 if file.lfs else file.blob_id or "" for file in siblings
        },
    )


def ask_bucket(address: str) -> dict[str, int]:
    """Lists a bucket path: bytes by relative name.

    Raises:
        ModuleNotFoundError: This kind of bucket needs another package.
        NoAnswer: It cannot be listed.
    """
    try:
        system, top = fsspec.core.url_to_fs(address)
        found: Any = system.find(top, detail=True)
    except ImportError as error:
        raise ModuleNotFoundError(str(error)) from error
    except Exception as error:
        raise NoAnswer(f"cannot be listed ({type(error).__name__})") from error
    return {path.removeprefix(f"{top}/"): info["size"] for path, info in found.items()}


def cache_folder(name: str, kind: str) -> pathlib.Path:
    """The folder of a repository in the hub's cache. It may not exist yet."""
    return pathlib.Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)


def cached_snapshot(name: str, kind: str) -> pathlib.Path | None:
    """The folder of the cached revision of a repository, or None. It may be incomplete."""
    reference = cache_folder(name, kind) / "refs" / "main"
    if not reference.is_file():
        return None
    folder = cache_folder(name, kind) / "snapshots" / reference.read_text().strip()
    return folder if folder.is_dir() else None


def matching(files: dict[str, int], patterns: Sequence[str]) -> dict[str, int]:
    """The files of which a pattern matches the name."""
    return {
        name: count
        for name, count in files.items()
        if any(fnmatch.fnmatch(name.lower(), pattern.lower()) for pattern in patterns)
    }


@dataclasses.dataclass(frozen=True)
class Download:
    """What a download has to fetch, in bytes."""

    total: int
    present: int

    @property
    def missing(self) -> int:
        return self.total - self.present


def download(name: str, kind: str, found: Repository, patterns: Sequence[str]) -> Download:
    """Compares the files on the hub with the hub's cache on this machine."""
    folder = cache_folder(name, kind)
    wanted = matching(found.files, patterns)
    present = 0
    for file, count in wanted.items():
        blob = found.blobs.get(file)
        # An unchanged file of an older revision is not fetched again: it has the same blob.
        if (folder / "snapshots" / found.revision / file).exists() or (
            blob and (folder / "blobs" / blob).exists()
        ):
            present += count
        elif blob:
            partial = folder.glob(f"blobs/{blob}*.incomplete")
            present += min(count, sum(part.stat().st_size for part in partial))
    return Download(sum(wanted.values()), present)
