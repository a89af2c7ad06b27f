"""Writes text files so that a crash never leaves a partial one."""

from __future__ import annotations

import os
import pathlib


def write_atomically(file: pathlib.Path, text: str) -> None:
    """Replace the contents of `file` with `text` in UTF-8. Readers see the old text or the new one.

    The text first goes to a file of the same name plus ".tmp" in the same folder, which must exist.
    """
    unfinished = file.with_name(file.name + ".tmp")
    with unfinished.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        # Without the fsync a power cut could leave the new name pointing at an empty file: the
        # rename may reach the disk before the data does.
        os.fsync(stream.fileno())
    os.replace(unfinished, file)
