"""Where the videos of a benchmark lie below the folder that a user names.

Owns the look-up, nothing of the files' contents. Refuses to guess: a name that is there twice is not taken by its name alone.
Invariant: what `find` returns is a file below the root, as a path relative to it.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re


class VideoFolder:
    """A folder that archives were unpacked into, perhaps with one folder more or less around them."""

    def __init__(self, root: str | os.PathLike):
        self.root = pathlib.Path(root)
        if not self.root.is_dir():
            raise FileNotFoundError(
                f"--videos {root}: no such folder; give the one that the benchmark's archives were unpacked into"
            )

    def find(self, path: str) -> str | None:
        """The file at `path` below the root, or the only one whose path ends like it as far as it goes; None where there is none."""
        if (self.root / path).is_file():
            return path
        parts = path.split("/")
        for start in range(1, len(parts)):
            tail = "/".join(parts[start:])
            if (self.root / tail).is_file():
                return tail
        places = self._by_name.get(parts[-1], [])
        return places[0] if len(places) == 1 and not _GENERIC.fullmatch(parts[-1]) else None

    @functools.cached_property
    def _by_name(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                found.setdefault(name, []).append(
                    (pathlib.Path(folder) / name).relative_to(self.root).as_posix()
                )
        return found


_GENERIC = re.compile(
    r"\d{1,4}\.\w+"
)  # "7.mp4" is in every folder of MMVU: its name alone says nothing, even where only one is here
