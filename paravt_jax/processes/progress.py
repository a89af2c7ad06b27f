"""Tells `paravt_extras.supervise` how far a command is, if that started it."""

from __future__ import annotations

import os

PROGRESS_FILE = "PARAVT_PROGRESS_FILE"
"""Environment variable with the path of the file that lines are appended to."""


def note_progress(line: str) -> None:
    """Note a finished piece of work, such as "rl 12"; the same piece gets the same line again."""
    path = os.environ.get(PROGRESS_FILE)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")
