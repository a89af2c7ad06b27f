"""This project's folder in the user's cache folder."""

from __future__ import annotations

import os
import pathlib


def user_folder() -> pathlib.Path:
    """~/.cache/paravt-jax, or paravt-jax in $XDG_CACHE_HOME if that is set."""
    parent = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(parent) / "paravt-jax"
