"""Rejects addresses such as gs://bucket/run where commands need a local path.

`pathlib` would read gs://bucket/run as a folder named "gs:" below the current one, and a run would
finish with its files on the wrong disk.
"""

from __future__ import annotations

import os
import re

# One slash, because pathlib.Path collapses two. A single letter before the colon is a drive.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def require_local(field: str, path: str | os.PathLike[str] | None) -> None:
    """Raise ValueError, naming `field`, if `path` is an address such as gs://bucket/run."""
    if path is None:
        return
    text = os.fspath(path)
    if _ADDRESS.match(text):
        raise ValueError(
            f"{field}: {text} is an address, but this has to be a local path; give a local folder "
            "or a mounted one, and copy to the bucket afterwards"
        )
