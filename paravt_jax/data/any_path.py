"""Local paths, and those of runs, which may also be below gs:// addresses of Google Cloud Storage.

`pathlib` would read gs://bucket/run as a folder named "gs:" below the current one, and a command
would finish with its files on the wrong disk.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re

from etils import epath

AnyPath = pathlib.Path | epath.Path
"""A local path, or one below gs://."""

_SCHEME = "gs://"
# gs://BUCKET/FOLDER
_FOLDER = re.compile(r"gs://[a-z0-9][a-z0-9._-]{2,}(/[^/\s]+)+/?")
# One slash, because pathlib.Path collapses two. A single letter before the colon is a drive.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def is_bucket(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is an address of Google Cloud Storage."""
    return os.fspath(path).startswith(_SCHEME)


def is_address(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is an fsspec address, such as gs://bucket/model."""
    return "://" in os.fspath(path)


def any_path(path: str | os.PathLike[str]) -> AnyPath:
    """Return an absolute local path, or an address.

    Raises:
        ModuleNotFoundError: It is an address, and the package for it is missing.
    """
    if not is_bucket(path):
        return pathlib.Path(path).absolute()
    # gcsfs brings google-cloud-storage.
    if importlib.util.find_spec("gcsfs") is None:
        raise ModuleNotFoundError(
            f"{path} needs the package gcsfs; install it with pip install -e '.[gcs]'"
        )
    import fsspec.config

    # TensorStore and other hosts write beside gcsfs, so what it listed before does not count.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return epath.Path(path)


def require_expanded(field: str, path: str | os.PathLike[str]) -> None:
    """Raise ValueError, naming `field`, if `path` begins with a ~ for the home directory.

    Shells expand it, but neither behind an = nor in quotes.
    """
    if str(path).startswith("~"):
        raise ValueError(
            f"{field}: {path} begins with a ~ that no shell has expanded; give "
            f"{os.path.expanduser(path)}, or ./{path} for a folder of that name"
        )


def require_folder_or_bucket(field: str, path: str) -> None:
    """Raise ValueError unless `path` is local, or a folder in a bucket."""
    require_expanded(field, path)
    if is_bucket(path):
        if not _FOLDER.fullmatch(path):
            raise ValueError(
                f"{field}: {path}; give gs://BUCKET/FOLDER, where BUCKET has three or more "
                "characters: lower-case letters, digits, -, _ and ."
            )
    elif _ADDRESS.match(path):
        raise ValueError(
            f"{field}: {path} is an address that runs cannot write to; give a local folder, one "
            "that is mounted, or gs://BUCKET/FOLDER"
        )


def require_local(field: str, path: str | os.PathLike[str]) -> None:
    """Raise ValueError, naming `field`, unless `path` is local."""
    require_expanded(field, path)
    if _ADDRESS.match(os.fspath(path)):
        raise ValueError(
            f"{field}: {path} is an address, but this has to be a local path; give a local folder "
            "or a mounted one, and copy to the bucket afterwards"
        )


def user_folder() -> pathlib.Path:
    """Return ~/.cache/paravt-jax, or paravt-jax in $XDG_CACHE_HOME if that is set.

    Raises:
        FileNotFoundError: The user has no home directory, as in some containers.
    """
    parent = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if parent.startswith("~"):
        raise FileNotFoundError("no home directory: set HOME or XDG_CACHE_HOME to a folder")
    return pathlib.Path(parent) / "paravt-jax"
