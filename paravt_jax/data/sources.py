"""Finds published files: in a local folder, on the Hugging Face hub or in a bucket.

Archives of media are unpacked into one root. The source is never changed.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

from paravt_jax.data import hub
from paravt_jax.data.archives import SUFFIXES, unpack
from paravt_jax.data.buckets import fetch_files
from paravt_jax.progress import Progress

_VIDEOS = (".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v", ".ts", ".mpg")
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
MEDIA = (*_VIDEOS, *_PICTURES)
MEDIA_PATTERNS = tuple(f"*{suffix}" for suffix in (*SUFFIXES, *MEDIA))
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
        FileNotFoundError: The source does not exist, or no file of a bucket matches.
        ModuleNotFoundError: This kind of bucket needs another package.
        ConnectionError: A file of a bucket cannot be fetched.
    """
    if "://" in source:
        fetch_files(source, folder, patterns)
        return folder
    local = pathlib.Path(source).expanduser()
    if local.is_dir():
        return local
    return from_hub(source, patterns)


def from_hub(source: str, patterns: Sequence[str]) -> pathlib.Path:
    """Download the matching files of a data set, and return its folder in the hub's cache.

    Raises:
        FileNotFoundError: `source` is not a hub id, or it cannot be downloaded.
    """
    if not hub.is_hub_id(source):
        raise FileNotFoundError(
            f"{source}: neither a folder nor a hub id (owner/name); give one of these"
        )
    return hub.snapshot(source, patterns, repo_type="dataset")


def media_root(
    source: str, folder: pathlib.Path, check: Callable[[], None] = lambda: None
) -> pathlib.Path:
    """Return the folder to which the media paths of the published rows are relative.

    A local folder that contains media is used directly. Archives are unpacked to `folder`/media if
    they come from elsewhere, or from a local folder without media.

    Args:
        source: As in `fetch`.
        folder: Where to put what is copied or unpacked.
        check: Called after each archive. It may raise to interrupt.

    Raises:
        ValueError: An archive cannot be unpacked.
        FileNotFoundError, ModuleNotFoundError, ConnectionError: As in `fetch`.
    """
    root = folder / "media"
    found = fetch(source, root, MEDIA_PATTERNS)
    # Archives beside media in a local folder are taken to be unpacked already.
    is_local = found == pathlib.Path(source).expanduser()
    if is_local and any(path.suffix.lower() in MEDIA for path in found.rglob("*")):
        return found
    files = (path for path in found.rglob("*") if path.name.lower().endswith(SUFFIXES))
    archives = sorted(path.relative_to(found).as_posix() for path in files)
    if not archives:
        return found
    with Progress("unpack media", "archive") as progress:
        for done, name in enumerate(archives, 1):
            unpack(name, found, root)
            progress.update(done, len(archives))
            check()
    return root
