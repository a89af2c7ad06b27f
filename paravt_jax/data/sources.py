"""Finds published files: in a local folder, on the Hugging Face hub or in a bucket.

Where a download from the hub fails, the error says what to do.

Archives of media are unpacked into one root. The source is never changed.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx2
import huggingface_hub
from huggingface_hub import constants, errors
from tqdm import tqdm

from paravt_jax.data.any_path import require_expanded
from paravt_jax.data.archives import SUFFIX, unpack
from paravt_jax.data.buckets import fetch_files
from paravt_jax.data.foreign import shortened

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# Seconds for a request of a list of files.
_PATIENCE = 10.0
# Unauthorised, forbidden and not found: asking again would not help.
_REFUSED = {401, 403, 404}
# What the client raises where a download fails; ImportError and ValueError for a proxy that it
# cannot use.
_FAILURES = (
    ImportError,
    ValueError,
    errors.HfHubHTTPError,
    errors.LocalEntryNotFoundError,
    errors.OfflineModeIsEnabled,
    httpx2.HTTPError,
)
MEDIA = (
    *(".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v", ".ts", ".mpg"),
    *(".png", ".jpg", ".jpeg", ".webp", ".bmp"),
)
MEDIA_PATTERNS = tuple(f"*{suffix}" for suffix in (SUFFIX, *MEDIA))
"""Patterns of the names of media and of archives."""


def fetch(source: str, folder: pathlib.Path, patterns: Sequence[str]) -> pathlib.Path:
    """Return a local folder with the files of a source.

    Args:
        source: A local folder, a hub id (owner/name) or the address of a bucket (gs://...).
        folder: Where files of a bucket are copied to.
        patterns: Patterns of file names, such as "*.parquet". A local folder is not filtered.

    Returns:
        The local folder itself, a folder in the hub's cache, or `folder`.

    Raises:
        FileNotFoundError: The source does not exist, no file of a bucket matches, or this kind of
            bucket needs another package.
        ConnectionError: A file cannot be fetched.
    """
    if "://" in source:
        fetch_files(source, folder, patterns)
        return folder
    local = pathlib.Path(source)
    if local.is_dir():
        return local
    return snapshot(source, patterns, repo_type="dataset")


def media_root(
    source: str, folder: pathlib.Path, check: Callable[[], None] = lambda: None
) -> pathlib.Path:
    """Return the folder to which the media paths of published data are relative.

    A local folder that contains media is used directly. Archives are unpacked to `folder`/media if
    they come from elsewhere, or from a local folder without media.

    Args:
        source: As in `fetch`.
        folder: Where to put what is copied or unpacked.
        check: Called after each archive. It may raise to interrupt.

    Raises:
        ValueError: An archive cannot be unpacked.
        FileNotFoundError, ConnectionError: As in `fetch`.
    """
    root = folder / "media"
    fetched = fetch(source, root, MEDIA_PATTERNS)
    # Archives beside media in a local folder are taken to be unpacked already.
    is_local = fetched == pathlib.Path(source)
    if is_local and any(path.suffix.lower() in MEDIA for path in fetched.rglob("*")):
        return fetched
    files = (path for path in fetched.rglob("*") if path.name.lower().endswith(SUFFIX))
    archives = sorted(path.relative_to(fetched).as_posix() for path in files)
    if not archives:
        return fetched
    with tqdm(archives, "unpack media", unit="archive") as bar:
        for name in bar:
            unpack(name, fetched, root)
            check()
    return root


# --- the hub ---


def is_hub_id(source: str) -> bool:
    """Return whether a text has the form owner/name, and is no path of a file."""
    return _ID.fullmatch(source) is not None and not pathlib.Path(source).is_file()


def require_source(source: str, repo_type: str = "dataset") -> None:
    """Raise FileNotFoundError for a text that names no folder, repository or address.

    Raises:
        ValueError: It begins with a ~.
    """
    require_expanded(repo_type, source)
    if not ("://" in source or is_hub_id(source) or pathlib.Path(source).is_dir()):
        scenes = " (python -m paravt_extras.scenes draws one)" if repo_type == "dataset" else ""
        raise FileNotFoundError(
            f"{source}: neither a folder nor a hub id (owner/name); give one of these{scenes}"
        )


def snapshot(id: str, patterns: Sequence[str], repo_type: str = "model") -> pathlib.Path:
    """Download the matching files of a repository, and return their folder in the hub's cache.

    A repeated call fetches only what is missing.

    Args:
        id: The repository, such as `Qwen/Qwen3-VL-8B-Instruct`.
        patterns: Patterns of file names, such as "*.json".
        repo_type: `model` or `dataset`.

    Raises:
        FileNotFoundError: There is no such repository, or it is not for this user.
        ConnectionError: The hub does not answer.
    """
    with _named_failures(id, repo_type):
        return pathlib.Path(
            huggingface_hub.snapshot_download(
                id, repo_type=repo_type, allow_patterns=list(patterns)
            )
        )


def list_files(id: str, repo_type: str = "model") -> dict[str, int]:
    """Return the bytes of each file of a repository, by name; raises like `snapshot`."""
    with _named_failures(id, repo_type):
        info: Any = huggingface_hub.HfApi().repo_info(
            id, repo_type=repo_type, files_metadata=True, timeout=_PATIENCE
        )
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


@contextlib.contextmanager
def _named_failures(id: str, repo_type: str) -> Iterator[None]:
    """Turn what the client raises into an error that names the repository and the remedy."""
    require_source(id, repo_type)
    try:
        yield
    except _FAILURES as error:
        page = f"{constants.ENDPOINT}/{'datasets/' if repo_type == 'dataset' else ''}{id}"
        status = getattr(getattr(error, "response", None), "status_code", None)
        is_proxy = isinstance(error, ImportError | ValueError)
        is_final = is_proxy or status in _REFUSED or constants.HF_HUB_OFFLINE
        remedy = (
            f"check the id, network and proxies; if {page} is private or gated, accept its terms, "
            "and log in (hf auth login, or set HF_TOKEN)"
        )
        if constants.HF_HUB_OFFLINE and not is_proxy:
            remedy = "unset HF_HUB_OFFLINE"
        # Not from the client's error, whose type would decide the exit code of a command.
        raise (FileNotFoundError if is_final else ConnectionError)(
            f"{id}: no such folder, and the download from the hub failed ({type(error).__name__}: "
            f"{shortened(error, 300)}); {remedy}; or download it elsewhere and give its folder"
        ) from None
