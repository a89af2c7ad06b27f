"""Folders behind addresses (gs://..., s3://...): fetched into the cache folder, and written to.

    ~/.cache/paravt-jax/fetched/<digest of the address>/   one folder per address

A file that has been fetched is used again if the bucket still has the same version of it: the same
size, and the same ETag, checksum or time.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import pathlib
import uuid
from collections.abc import Sequence

from paravt_jax.data.file_sums import SUMS
from paravt_jax.data.media_files import open_bucket
from paravt_jax.data.remote_files import BucketFiles
from paravt_jax.data.stored_settings import lock


def cache_folder(address: str) -> pathlib.Path:
    """The local folder of an address. It may not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    digest = hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]
    return pathlib.Path(cache) / "paravt-jax" / "fetched" / digest


def fetch_folder(address: str, patterns: Sequence[str]) -> pathlib.Path:
    """Fetch the matching files of an address, and return their local folder.

    Files in subfolders are left out. Files that the bucket does not have any more are deleted.

    Args:
        address: Such as gs://bucket/model.
        patterns: Patterns of file names, such as "*.json".

    Raises:
        FileNotFoundError: The address cannot be listed, or has no such files.
        ModuleNotFoundError: Its scheme needs another package.
        ConnectionError: A file cannot be fetched.
    """
    files = BucketFiles(address)
    plain = [name for name in files.sizes if "/" not in name]
    names = [name for name in plain if any(fnmatch.fnmatch(name, p) for p in patterns)]
    if not names:
        raise FileNotFoundError(
            f"{address}: no {' or '.join(patterns)} among its {len(plain)} files; check the path"
        )
    folder = cache_folder(address)
    folder.mkdir(parents=True, exist_ok=True)
    # Several processes of a host may start at once. Each waits for the one before, and then finds
    # the files.
    with lock(folder / ".lock", wait=True):
        for file in folder.iterdir():
            if not file.name.startswith(".") and file.name not in files.sizes:
                file.unlink()
        files.fetch(sorted(names), folder)
    return folder


def require_new_folder(field: str, address: str) -> None:
    """Refuse an address to which a new folder cannot be written, before work begins.

    Raises:
        FileExistsError: There is something already.
        FileNotFoundError: fsspec does not know the scheme, or the bucket cannot be written to.
        ModuleNotFoundError: The scheme needs another package.
    """
    system, top = open_bucket(address)
    probe = f"{top.rstrip('/')}/.probe-{uuid.uuid4().hex}"
    # Broad because every file system raises errors of its own kinds.
    try:
        present = system.exists(top)
        if not present:
            system.pipe_file(probe, b"probe")
            system.rm_file(probe)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise FileNotFoundError(
            f"{field}: {address}: cannot be written to ({reason}); check the bucket and the "
            "credentials"
        ) from error
    if present:
        raise FileExistsError(f"{field} {address}: exists; name a new folder, or remove it first")


def upload_folder(folder: pathlib.Path, address: str) -> None:
    """Upload the files of a folder, with its checksums last: they mark the upload as complete.

    Raises:
        ConnectionError: A file cannot be uploaded, or has another size there.
    """
    system, top = open_bucket(address)
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    for name in sorted(names, key=lambda name: (name == SUMS, name)):
        target = f"{top.rstrip('/')}/{name}"
        try:
            system.put_file(str(folder / name), target)
            system.invalidate_cache()
            size = system.info(target)["size"]
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ConnectionError(
                f"{address}: {name} cannot be uploaded ({reason}); check the network, remove what "
                "is there, and repeat the command"
            ) from error
        if size != (folder / name).stat().st_size:
            raise ConnectionError(f"{address}: {name} has {size} bytes there, which is wrong")
