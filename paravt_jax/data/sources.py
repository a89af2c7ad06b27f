"""Finds published files: in a local folder, on the Hugging Face hub or in a bucket.

Archives of media are unpacked into one root. Copying and unpacking resume after an interruption: a
file gets its final name only when it is complete. The source is never changed. `disk_budget` does
the same with a limit on the disk.
"""

from __future__ import annotations

import fnmatch
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from paravt_jax.data import hub
from paravt_jax.data.archives import PATTERNS, find_archives, unpack
from paravt_jax.data.disk_budget import MediaPlan, fetch_media, plan_media, require_budget
from paravt_jax.data.remote_files import BucketFiles, HubFiles, LocalFiles, RemoteFiles
from paravt_jax.progress import size

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
        return fetch_within(source, folder, patterns, budget=None)
    local = pathlib.Path(source).expanduser()
    if local.is_dir():
        return local
    return from_hub(source, patterns)


def from_hub(source: str, patterns: Sequence[str]) -> pathlib.Path:
    """Download the matching files of a data set, and return its folder in the hub's cache.

    Raises:
        FileNotFoundError: `source` is not a hub id, or it cannot be downloaded.
    """
    _require_hub_id(source)
    return hub.snapshot(source, patterns, repo_type="dataset")


def _require_hub_id(source: str) -> None:
    if not hub.is_hub_id(source):
        raise FileNotFoundError(
            f"{source}: neither a folder nor a hub id (owner/name); give one of these"
        )


def open_source(source: str) -> RemoteFiles:
    """The files of a source, without fetching any.

    Args:
        source: A local folder, a hub id or the address of a bucket.

    Raises:
        OSError: There is no such source, or it does not answer.
        ModuleNotFoundError: This kind of bucket needs another package.
    """
    if "://" in source:
        return BucketFiles(source)
    local = pathlib.Path(source).expanduser()
    if local.is_dir():
        return LocalFiles(local)
    _require_hub_id(source)
    return HubFiles(source)


def fetch_within(
    source: str, folder: pathlib.Path, patterns: Sequence[str], budget: int | None
) -> pathlib.Path:
    """Like `fetch`, but files of the hub go to `folder` as well, and are limited.

    Args:
        source: As in `fetch`.
        folder: Where files of the hub or of a bucket are copied to.
        patterns: As in `fetch`.
        budget: Upper bound on the bytes of the files; None: no limit.

    Raises:
        ValueError: The files are larger than the budget.
        OSError, ModuleNotFoundError: As in `open_source`; or no file matches.
    """
    files = open_source(source)
    names = [
        name
        for name in sorted(files.sizes)
        if any(fnmatch.fnmatch(name.lower(), pattern) for pattern in patterns)
    ]
    if not names:
        raise FileNotFoundError(
            f"{source}: no {' or '.join(patterns)} among its {len(files.sizes)} files; check the "
            "path"
        )
    total = sum(files.sizes[name] for name in names)
    if budget is not None and total > budget:
        raise ValueError(f"--disk: {size(budget)}; {source} alone has {size(total)}: give more")
    return files.fetch(names, folder)


def fetch_named(
    source: str,
    folder: pathlib.Path,
    paths: Iterable[str],
    budget: int | None,
    reserve: Mapping[str, int],
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> pathlib.Path:
    """Fetch only the media that rows name, archive by archive, and return their folder.

    Args:
        source: As in `fetch`. A local folder that contains media is used directly.
        folder: Where to put what is fetched or unpacked.
        paths: The paths that rows name.
        budget: Bytes that `folder` may take on disk; None: no limit.
        reserve: Bytes that the rest of `folder` takes, by what it is.
        tell: Called with the megabytes that are done, and all. It may raise to interrupt.

    Raises:
        ValueError: The budget is too small, or an archive cannot be unpacked.
        OSError, ModuleNotFoundError: As in `open_source`; or a file cannot be fetched, or the disk
            has not enough room.
    """
    here = pathlib.Path(source).expanduser()
    if "://" not in source and here.is_dir() and _holds_media(here):
        folder.mkdir(parents=True, exist_ok=True)
        require_budget(MediaPlan({}, (), fetched=False), budget, folder, reserve)
        return here
    files = open_source(source)
    local = isinstance(files, LocalFiles)
    names = _relative(paths, (folder / "media").resolve())
    plan = plan_media(files, names, MEDIA, fetched=not local)
    if not plan.loose and not plan.tasks:
        raise FileNotFoundError(
            f"{source}: none of the {len(names):,} videos and pictures that rows name is among its "
            f"{len(files.sizes):,} files; check the source, and that it belongs to the annotations"
        )
    folder.mkdir(parents=True, exist_ok=True)
    require_budget(plan, budget, folder, reserve)
    return fetch_media(files, plan, names, folder, budget, tell)


def _relative(paths: Iterable[str], root: pathlib.Path) -> frozenset[str]:
    """Paths of rows, relative to the folder of the media. Others cannot be fetched."""
    found = set()
    for path in map(pathlib.PurePosixPath, paths):
        if not path.is_absolute():
            found.add(str(path))
        elif path.is_relative_to(root):
            found.add(str(path.relative_to(root)))
    return frozenset(found)


def media_root(
    source: str, folder: pathlib.Path, tell: Callable[[int, int], None] | None = None
) -> pathlib.Path:
    """Return the folder to which the media paths of the published rows are relative.

    A local folder that contains media is used directly. Archives are unpacked to `folder`/media if
    they come from the hub or from a local folder without media.

    Args:
        source: A local folder or a hub id.
        folder: Where to put what is unpacked.
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
