"""Copies files between this machine and addresses such as gs://bucket/model or s3://bucket/model.

A file that has been fetched is used again if the bucket still has the same version of it. Beside
`FOLDER/a.json`, `FOLDER/.a.json.version` notes which one it is.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import fsspec
import fsspec.core

from paravt_jax.data import foreign
from paravt_jax.data.any_path import is_address, require_expanded, user_folder
from paravt_jax.data.archives import inside
from paravt_jax.data.stored import lock, write_atomically

# Files that readers open first. They are written last, so a folder that has one is complete.
_LAST = ("config.json", "adapter_config.json")


def open_bucket(address: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of an address, and the path in it.

    Raises:
        FileNotFoundError: fsspec does not know the scheme, or needs a package that is not there.
    """
    remedy = "install what it needs, or give an address that fsspec supports, or a folder"
    with _named_errors(f"{address}: cannot be opened", remedy):
        return fsspec.core.url_to_fs(address)


def fetch_files(
    address: str, folder: pathlib.Path, patterns: Sequence[str], depth: int | None = None
) -> list[str]:
    """Copy the matching files of an address into a folder.

    Args:
        address: Such as gs://bucket/data.
        folder: Where to put them, under their relative names.
        patterns: Patterns of file names, such as "*.json".
        depth: Largest number of subfolders in a name; None: any.

    Returns:
        The names of all matching files.

    Raises:
        FileNotFoundError: The address cannot be listed, or has no such files.
        ConnectionError: A file cannot be fetched, or the address does not answer.
    """
    system, top = open_bucket(address)
    with _named_errors(f"{address}: cannot be listed", "check the path and the credentials"):
        system.invalidate_cache()
        files: Any = system.find(top, detail=True)
    listed = {os.path.relpath(path, top.rstrip("/")): info for path, info in files.items()}
    names = [
        name for name in _matching(listed, patterns) if depth is None or name.count("/") <= depth
    ]
    if not names:
        raise FileNotFoundError(
            f"{address}: no {' or '.join(patterns)} among its {len(listed)} files; check the path"
        )
    for name in names:
        remedy = "check the credentials and the network, and repeat the command"
        with _named_errors(f"{address}: {name} cannot be read", remedy):
            _fetch(system, listed[name], inside(folder, name))
    return names


def _fetch(system: fsspec.AbstractFileSystem, info: dict[str, Any], target: pathlib.Path) -> None:
    """Copy a file unless this version is here. It gets its name when it is complete."""
    # A web page lists names only.
    if info["size"] is None:
        info = system.info(info["name"])
    # The bucket's entry has the time of the last change or a checksum.
    version = str(info)
    noted = target.with_name(f".{target.name}.version")
    if target.is_file() and noted.is_file() and noted.read_text() == version:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # An old file must not pass for the new version.
    target.unlink(missing_ok=True)
    unfinished = target.with_name(f".{target.name[:100]}.partial")
    system.get_file(info["name"], str(unfinished))
    if unfinished.stat().st_size != info["size"]:
        raise ConnectionError("it was cut off, or it changed while it was fetched")
    write_atomically(noted, version)
    os.replace(unfinished, target)


def fetch_folder(address: str, patterns: Sequence[str]) -> pathlib.Path:
    """Fetch the matching files of an address into the user's cache, and return their folder.

    Files in subfolders are left out. Matching files that the bucket does not have any more are
    deleted. The arguments and errors are those of `fetch_files`.
    """
    digest = hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]
    folder = user_folder() / "fetched" / digest
    folder.mkdir(parents=True, exist_ok=True)
    # Several processes of a host may start at once. Each waits for the one before, and then finds
    # the files.
    with lock(folder / ".lock", wait=True):
        names = fetch_files(address, folder, patterns, depth=0)
        # The weights stay if only other files were asked for.
        for name in _matching(os.listdir(folder), patterns):
            if not name.startswith(".") and name not in names:
                (folder / name).unlink()
    return folder


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return sorted(
        name
        for name in names
        if any(fnmatch.fnmatch(name.lower(), pattern) for pattern in patterns)
    )


@contextlib.contextmanager
def appearing_at(field: str, path: str) -> Iterator[pathlib.Path]:
    """Yield the path of a local folder to create, which is at `path` when the block has ended.

    Below an address, files are copied from a temporary folder. Reads and writes that fail for a
    moment are repeated by the package for the address.

    Args:
        field: The setting that names it, for messages.
        path: A local folder, or an address.

    Raises:
        FileExistsError: There is something already.
        FileNotFoundError: fsspec does not know the scheme, or there is no such bucket.
        ConnectionError: The bucket does not answer.
    """
    require_expanded(field, path)
    taken = f"{field} {path}: exists; name a new folder, or remove this one first"
    if not is_address(path):
        if os.path.exists(path):
            raise FileExistsError(taken)
        yield pathlib.Path(path)
        return
    system, top = open_bucket(path)
    with _named_errors(f"{field}: {path}: cannot be read", "check the bucket and the credentials"):
        present = system.exists(top)
    if present:
        raise FileExistsError(taken)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "new"
        yield folder
        files = [file for file in folder.rglob("*") if file.is_file()]
        remedy = "check the network, remove what is there, and repeat the command"
        for file in sorted(files, key=lambda file: (file.name in _LAST, file)):
            name = file.relative_to(folder).as_posix()
            with _named_errors(f"{path}: {name} cannot be uploaded", remedy):
                system.put_file(str(file), f"{top.rstrip('/')}/{name}")


@contextlib.contextmanager
def _named_errors(what: str, remedy: str) -> Iterator[None]:
    """Turn errors of a file system into one line: a mistake, or what may work the next time."""
    # Broad because every file system raises errors of its own kinds.
    try:
        yield
    except Exception as error:
        mistake = isinstance(error, FileNotFoundError | PermissionError | ValueError | ImportError)
        kind = FileNotFoundError if mistake else ConnectionError
        reason = foreign.shortened(f"{type(error).__name__}: {error}", 300)
        raise kind(f"{what} ({reason}); {remedy}") from error
