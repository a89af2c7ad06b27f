"""Where published files come from: a local folder, a hub id or a bucket; and archives of media, unpacked into one root.

Owns copying and unpacking, each of which goes on where it was cut off. Refuses sources that are none of the three, and members of
archives that would land outside the root. Invariant: a file under its own name is whole; nothing of the source is changed.
"""

from __future__ import annotations

import concurrent.futures
import fnmatch
import os
import pathlib
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Sequence

import fsspec
import fsspec.core
import huggingface_hub
from huggingface_hub import errors

MEDIA = (
    ".mp4",
    ".mkv",
    ".webm",
    ".avi",
    ".mov",
    ".m4v",
    ".ts",
    ".mpg",
    ".png",
    ".jpg",
    ".jpeg",
    ".webp",
    ".bmp",
)
_MARKS = ".unpacked"


def fetch(source: str, folder: pathlib.Path, patterns: Sequence[str]) -> pathlib.Path:
    """The local folder of a source's files that match: `source` itself where it is one, the hub's cache, or `folder`, to which a bucket's
    files are copied. FileNotFoundError where there are none, ModuleNotFoundError where a kind of bucket needs a package.
    """
    if "://" in source:
        return _copy(source, folder, patterns)
    local = pathlib.Path(source).expanduser()
    if local.is_dir():
        return local
    return from_hub(source, patterns)


def from_hub(source: str, patterns: Sequence[str]) -> pathlib.Path:
    """The folder in the hub's cache of a data set's files that match. FileNotFoundError where there are none."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source):
        raise FileNotFoundError(
            f"{source}: no such file or folder, and no hub id (owner/name); give one of these"
        )
    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(
                source, repo_type="dataset", allow_patterns=list(patterns)
            )
        )
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"{source}: not here, and the hub did not give it ({type(error).__name__}); check the id, the network and the token (hf auth "
            "login; some sets ask for consent on their page), or fetch it elsewhere and give its folder"
        ) from error


def _copy(source: str, folder: pathlib.Path, patterns: Sequence[str]) -> pathlib.Path:
    """The matching files of a bucket path, in `folder` under the names they have below it."""
    scheme = source.partition("://")[0]
    try:
        system, top = fsspec.core.url_to_fs(source)
    except ImportError as error:
        package = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "az": "adlfs", "abfs": "adlfs"}.get(
            scheme, f"the fsspec package of {scheme}://"
        )
        raise ModuleNotFoundError(
            f"{source}: {scheme}:// paths need {package}: pip install {package}, or copy the files and give their folder"
        ) from error
    except ValueError as error:
        raise FileNotFoundError(
            f"{source}: {error}; give a path that fsspec knows (gs://..., s3://...), a folder or a hub id"
        ) from error
    try:
        found = system.find(top, detail=True)
    except OSError as error:
        raise FileNotFoundError(
            f"{source}: cannot be listed ({error}); check the path and the credentials"
        ) from error
    names = {
        os.path.relpath(path, top).replace(os.sep, "/"): info["size"]
        for path, info in found.items()
    }
    wanted = {
        name: size
        for name, size in names.items()
        if any(fnmatch.fnmatch(name.lower(), pattern) for pattern in patterns)
    }
    if not wanted:
        raise FileNotFoundError(
            f"{source}: holds no {' or '.join(patterns)} among {len(names)} files; check the path"
        )
    for name, size in sorted(wanted.items()):
        target = _inside(folder, name)
        if target.is_file() and target.stat().st_size == size:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(target.name + ".partial")
        system.get_file(f"{top.rstrip('/')}/{name}", str(unfinished))
        os.replace(unfinished, target)
    return folder


def media_root(
    source: str, folder: pathlib.Path, tell: Callable[[int, int], None] | None = None
) -> pathlib.Path:
    """The folder under which the sentinel paths lie. A local folder with media in it is that, as it is; archives alone, and what comes from
    the hub or a bucket, are unpacked into `folder`/media. `tell(done, total)` hears of archives.

    Raises what `fetch` raises, and ValueError for an archive that cannot be unpacked.
    """
    patterns = ["*.zip", *(f"*{suffix}" for suffix in MEDIA)]
    found = fetch(source, folder / "media", patterns)
    archives = sorted(found.rglob("*.zip"))
    if not archives or (found == pathlib.Path(source).expanduser() and _holds_media(found)):
        return found
    root = folder / "media"
    unpack(archives, root, tell)
    return root


def _holds_media(folder: pathlib.Path) -> bool:
    return any(name.lower().endswith(MEDIA) for _, _, names in os.walk(folder) for name in names)


def unpack(
    archives: Iterable[pathlib.Path],
    root: pathlib.Path,
    tell: Callable[[int, int], None] | None = None,
) -> None:
    """Every file of the archives under `root`, several archives at a time; those that were unpacked whole before are passed over.

    Raises ValueError for a broken archive, and for a member that would land outside the root.
    """
    archives = list(archives)
    root.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(_unpack, archive, root) for archive in archives]
        try:
            for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                future.result()
                if tell is not None:
                    tell(done, len(archives))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _unpack(archive: pathlib.Path, root: pathlib.Path) -> None:
    mark = root / _MARKS / f"{archive.name}-{archive.stat().st_size}"
    if mark.exists():
        return
    try:
        with zipfile.ZipFile(archive) as file:
            for member in file.infolist():
                target = _inside(root, member.filename)
                if member.is_dir() or (
                    target.is_file() and target.stat().st_size == member.file_size
                ):
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                unfinished = target.with_name(f"{target.name}.{archive.stem}.partial")
                with file.open(member) as packed, unfinished.open("wb") as plain:
                    shutil.copyfileobj(packed, plain, 2**20)
                os.replace(unfinished, target)
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise ValueError(f"{archive}: cannot be unpacked ({error}); download it again") from error
    mark.parent.mkdir(exist_ok=True)
    mark.touch()


def _inside(root: pathlib.Path, name: str) -> pathlib.Path:
    """The path of a name below the root. Raises ValueError for one that is not."""
    path = pathlib.PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise ValueError(f"{name}: would lie outside {root}; remove it from the source")
    return root / path
