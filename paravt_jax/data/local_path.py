"""Refuses addresses such as gs://bucket/run as places to write to.

Commands write to local folders. `pathlib` would take gs://bucket/run for a folder named "gs:" below
the current one, so a run would finish with its files on the wrong disk.
"""

from __future__ import annotations

import os
import re

# A pathlib.Path collapses the two slashes into one. A single letter before the colon is a drive.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def require_local(field: str, path: str | os.PathLike[str] | None) -> None:
    """Raise ValueError, naming `field`, if `path` is an address such as gs://bucket/run."""
    if path is None:
        return
    text = os.fspath(path)
    if _ADDRESS.match(text):
        raise ValueError(
            f"{field}: {text} is an address, and this is a path on local disks; give a local "
            "folder or a mounted one (gcsfuse mounts a bucket), and copy to the bucket afterwards"
        )
