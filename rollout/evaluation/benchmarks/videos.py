"""Finds the videos of a benchmark below the folder that a user names."""

from __future__ import annotations

import functools
import os
import pathlib
import re

_NUMBERED = re.compile(r"\d{1,4}\.\w+")
"""Names such as "7.mp4". Every folder of MMVU has them, so a file with such a name may be the wrong
one even if no other on disk has it."""

_SUFFIXES = (".mp4", ".MP4", ".mkv", ".webm", ".avi", ".mov")
"""Suffixes of videos. Copies of a benchmark may have another container than its rows say."""


class VideoFolder:
    """A folder of unpacked archives, which may add or drop a folder around the videos."""

    def __init__(self, root: str | os.PathLike):
        self.root = pathlib.Path(root)
        if not self.root.is_dir():
            raise FileNotFoundError(
                f"--videos {root}: no such folder; "
                "give the one that the benchmark's archives were unpacked into"
            )

    def find(self, path: str) -> str | None:
        """Find a file that a benchmark names.

        Look first at `path` below the root, then at `path` without its leading folders, then for a
        file of the same name anywhere below the root. A video that is not found may have the suffix
        of another container, such as .mkv or .MP4 for .mp4.

        Returns:
            The file's path relative to the root; None if there is no such file, or if several files
            have the name.
        """
        found = self._find(path)
        stem, suffix = os.path.splitext(path)
        if found is None and suffix in _SUFFIXES:
            others = (self._find(stem + other) for other in _SUFFIXES if other != suffix)
            found = next((place for place in others if place is not None), None)
        return found

    def _find(self, path: str) -> str | None:
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
