"""Folders behind addresses (gs://..., s3://...), fetched into the cache folder.

    ~/.cache/paravt-jax/fetched/<digest of the address>/   one folder per address

A file that has been fetched is used again if the bucket still has the same version of it: the same
size, and the same ETag, checksum or time.
"""

from __future__ import annotations

import fnmatch
import hashlib
import pathlib
from collections.abc import Sequence

from paravt_jax.data.remote_files import BucketFiles
from paravt_jax.data.stored_settings import lock
from paravt_jax.data.user_folder import user_folder


def cache_folder(address: str) -> pathlib.Path:
    """The local folder of an address. It may not exist yet."""
    digest = hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]
    return user_folder() / "fetched" / digest


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
