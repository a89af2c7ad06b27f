"""Files that are there whole or not at all.

Owns how a text file is replaced. Invariant: whoever reads it, also after a crash in mid-write, finds the old text or the new one.
"""

from __future__ import annotations

import os
import pathlib


def write_atomically(file: pathlib.Path, text: str) -> None:
    """Replaces `file` by `text`, in UTF-8, through a neighbour with the ending .tmp; its folder has to be there."""
    unfinished = file.with_name(file.name + ".tmp")
    with unfinished.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(unfinished, file)
