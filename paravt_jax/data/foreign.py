"""Reads small files that come from strangers: model folders, tables, subtitles.

They are read whole, so their size is limited. Whatever is wrong with one ends in a single line that
names it. Media are opened by `media_files`, archives by `archives`.
"""

from __future__ import annotations

import io
import json
import os
import stat
from typing import Any

MOST_BYTES = 64 << 20
"""Upper bound on a file's size. The largest such file of a model, its tokenizer, has 11 MB."""

_LFS = b"version https://git-lfs.github.com/spec/"
POINTER = (
    "only a pointer of git-lfs, not the file itself; run git lfs pull there, or download the "
    "folder with hf download"
)
"""What is wrong with a pointer, and the remedy."""


class ForeignFileError(ValueError):
    """A file cannot be used; the message is one line that names it, the reason and the remedy."""


def read_bytes(path: str | os.PathLike, most: int = MOST_BYTES) -> bytes:
    """Read a whole file.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ForeignFileError: It is no regular file, too large, or a pointer of git-lfs to the real
            file.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ForeignFileError(f"{path}: larger than {most / 1e6:,.0f} MB; give the right file")
    require_content(path, data)
    return data


def open_regular(path: str | os.PathLike) -> io.BufferedReader:
    """Open a file to read. A pipe or a device, which may never end, is refused.

    Raises:
        OSError: There is no such file, it is a folder, or it cannot be read.
        ForeignFileError: It is something else.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ForeignFileError(f"{path}: no regular file; give the right file")
    return open(path, "rb")


def require_content(path: str | os.PathLike, start: bytes) -> None:
    """Raise ForeignFileError if a file that starts with these bytes is a pointer of git-lfs."""
    if is_pointer(start):
        raise ForeignFileError(f"{path}: {POINTER}")


def is_pointer(start: bytes) -> bool:
    """Return whether a file that starts with these bytes is a pointer of git-lfs."""
    return start.startswith(_LFS)


def read_object(path: str | os.PathLike, remedy: str = "fetch it again") -> dict[str, Any]:
    """Read a file that contains a JSON object.

    Args:
        path: The file.
        remedy: What a user can do about a damaged one.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ForeignFileError: It is too large, not JSON, or no object.
    """
    try:
        content = json.loads(read_bytes(path))
    except ForeignFileError:
        raise
    # ValueError: not UTF-8 or not JSON. RecursionError: nested too deeply.
    except (ValueError, RecursionError) as error:
        raise ForeignFileError(f"{path}: not JSON ({shortened(error)}); {remedy}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ForeignFileError(f"{path}: holds a {kind}, not a JSON object; {remedy}")
    return content


def shortened(error: Exception | str, most: int = 100) -> str:
    """A message in one line of at most `most` characters. Errors may quote a file's content."""
    text = " ".join(str(error).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."
