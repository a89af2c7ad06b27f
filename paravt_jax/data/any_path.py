"""Paths of runs: folders on a disk, or below gs:// addresses of Google Cloud Storage."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re

import fsspec.config
from etils import epath

AnyPath = pathlib.Path | epath.Path
"""A local path, or one below gs://. `pathlib` would turn gs://bucket into the folder "gs:"."""

_SCHEME = "gs://"
# gs://BUCKET/FOLDER
_ADDRESS = re.compile(r"gs://[a-z0-9][a-z0-9._-]+(/[^/\s]+)+/?")


def is_bucket(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an address of Google Cloud Storage."""
    return os.fspath(path).startswith(_SCHEME)


def any_path(path: str | os.PathLike[str]) -> AnyPath:
    """An absolute local path, or an address.

    Raises:
        ModuleNotFoundError: It is an address, and the package for it is missing.
    """
    if not is_bucket(path):
        return pathlib.Path(path).absolute()
    require_client(os.fspath(path))
    # TensorStore and other hosts write beside gcsfs, so what it listed before does not count.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return epath.Path(path)


def require_folder_or_bucket(field: str, path: str) -> None:
    """Raise ValueError unless `path` is local, or a folder in a bucket whose package is there."""
    if is_bucket(path):
        if not _ADDRESS.fullmatch(path):
            raise ValueError(f"{field}: {path}; give a folder in a bucket, as gs://BUCKET/FOLDER")
        try:
            require_client(path)
        except ModuleNotFoundError as error:
            raise ValueError(f"{field}: {error}") from error
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", path):
        raise ValueError(
            f"{field}: {path} is an address that runs cannot write to; give a local folder, one "
            "that is mounted, or gs://BUCKET/FOLDER"
        )


def require_client(path: str) -> None:
    """Raise ModuleNotFoundError unless the packages for buckets are installed."""
    # gcsfs brings google-cloud-storage.
    if importlib.util.find_spec("gcsfs") is None:
        raise ModuleNotFoundError(
            f"{path} needs the package gcsfs; install it with pip install -e '.[gcs]'"
        )
