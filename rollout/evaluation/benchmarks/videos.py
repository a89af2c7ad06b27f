"""Finds the videos of a benchmark below the folder that a user names."""

from __future__ import annotations

import functools
import os
import pathlib
import re

_NUMBERED = re.compile(r"\d{1,4}\.\w+")
"""Names such as "7.mp4", which are in every folder of MMVU and tell nothing by themselves, even if
only one of them is on disk."""


class VideoFolder:
    """A folder with unpacked archives. They may add a folder around the videos, or drop one."""

    def __init__(self, root: str | os.PathLike):
        self.root = pathlib.Path(root)
        if not self.root.is_dir():
            raise FileNotFoundError(
                f"--videos {root}: no such folder; "
                "give the one that the benchmark's archives were unpacked into"
            )

    def find(self, path: str) -> str | None:
        """Find a file that a benchmark names.

        It is the file at `path` below the root, else at `path` without its first folders, else the
        only file below the root with the same name.

        Returns:
            The file's path relative to the root; None if there is no such file, or if several have
            the name.
        """
        parts = path.split("/")
        for start in range(len(parts)):
            tail = "/".join(parts[start:])
            if (self.root / tail).is_file():
                return tail
        name = parts[-1]
        places = self._by_name.get(name, [])
        if len(places) != 1 or _NUMBERED.fullmatch(name):
            return None
        return places[0]

    @functools.cached_property
    def _by_name(self) -> dict[str, list[str]]:
        """All files below the root, as relative paths by file name."""
        found: dict[str, list[str]] = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                place = (pathlib.Path(folder) / name).relative_to(self.root)
                found.setdefault(name, []).append(place.as_posix())
        return found
