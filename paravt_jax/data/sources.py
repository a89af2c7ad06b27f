"""Finds published files: in a local folder, on the Hugging Face hub or in a bucket.

Archives of media are unpacked into one root. Copying and unpacking resume after an interruption: a
file gets its final name only when it is complete. The source is never changed.
"""

from __future__ import annotations

import fnmatch
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import fsspec

from paravt_jax.data import hub
from paravt_jax.data.archives import PATTERNS, find_archives, inside, unpack
from paravt_jax.data.media_files import open_bucket

_VIDEOS = (".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v", ".ts", ".mpg")
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
MEDIA = (*_VIDEOS, *_PICTURES)
MEDIA_PATTERNS = (*PATTERNS, *(f"*{suffix}" for suffix in MEDIA))
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
    """
    if "://" in source:
        return _copy(source, folder, patterns)
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


def _copy(source: str, folder: pathlib.Path, patterns: Sequence[str]) -> pathlib.Path:
    """Copy the matching files of a bucket path to `folder`, with their relative names."""
    system, top = open_bucket(source)
    sizes = _list_files(source, system, top)
    matching = {
        name: size
        for name, size in sizes.items()
        if any(fnmatch.fnmatch(name.lower(), pattern) for pattern in patterns)
    }
    if not matching:
        raise FileNotFoundError(
            f"{source}: no {' or '.join(patterns)} among its {len(sizes)} files; check the path"
        )
    for name, size in sorted(matching.items()):
        target = inside(folder, name)
        if target.is_file() and target.stat().st_size == size:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        # Rename the copy only when it is complete: an interrupted copy must not pass for the file.
        unfinished = target.with_name(target.name + ".partial")
        system.get_file(f"{top.rstrip('/')}/{name}", str(unfinished))
        os.replace(unfinished, target)
    return folder


def _list_files(source: str, system: fsspec.AbstractFileSystem, top: str) -> dict[str, int]:
    """The sizes in bytes of all files below `top`, by relative name."""
    try:
        # With `detail` this is a dict of file information by path.
        found: Any = system.find(top, detail=True)
    except OSError as error:
        raise FileNotFoundError(
            f"{source}: cannot be listed ({error}); check the path and the credentials"
        ) from error
    return {
        os.path.relpath(path, top).replace(os.sep, "/"): info["size"]
        for path, info in found.items()
    }


def media_root(
    source: str, folder: pathlib.Path, tell: Callable[[int, int], None] | None = None
) -> pathlib.Path:
    """Return the folder to which the media paths of the published rows are relative.

    A local folder that contains media is used directly. Archives are unpacked to `folder`/media if
    they come from the hub, from a bucket or from a local folder without media.

    Args:
        source: A local folder, a hub id or the address of a bucket.
        folder: Where to put what is copied or unpacked.
        tell: Called while archives are unpacked with the megabytes that are done, and all.

    Raises:
        ValueError: An archive cannot be unpacked.
        FileNotFoundError: As in `fetch`.
        ModuleNotFoundError: As in `fetch`.
    """
    found = fetch(source, folder / "media", MEDIA_PATTERNS)
    # Archives beside media in a local folder are taken to be unpacked already.
    if found == pathlib.Path(source).expanduser() and _holds_media(found):
        return found
    files = (file for file in found.rglob("*") if file.is_file())
    archives = find_archives(
        {file.relative_to(found).as_posix(): file.stat().st_size for file in files}
    )
    if not archives:
        return found
    root = folder / "media"
    unpack(archives, found, root, tell)
    return root


def _holds_media(folder: pathlib.Path) -> bool:
    for _, _, names in os.walk(folder):
        if any(name.lower().endswith(MEDIA) for name in names):
            return True
    return False
