"""Where commands write: local folders and files only.

Owns the one refusal of addresses. `pathlib` takes gs://bucket/run for a folder of that name below
the current one.
"""

from __future__ import annotations

import os
import re

# A pathlib.Path has one slash left of the two; one letter before the colon is a drive.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def require_local(field: str, path: str | os.PathLike[str] | None) -> None:
    """Raises ValueError naming the `field` where `path` is an address such as gs://bucket/run."""
    if path is not None and _ADDRESS.match(text := os.fspath(path)):
        raise ValueError(
            f"{field}: {text} is an address, and this is a path on local disks; give a local "
            "folder or a mounted one (gcsfuse mounts a bucket), and copy to the bucket afterwards"
        )
