"""Reads small files that come from strangers: model folders, tables, subtitles.

They are read whole, so their size is limited. Whatever is wrong with one ends in a single line that
names it. Media are opened by `media_files`, archives by `archives`.
"""

from __future__ import annotations

import codecs
import io
import itertools
import json
import os
import re
import stat
from typing import Any

from paravt_jax.method.records import Subtitle

MOST_BYTES = 64 << 20
"""Upper bound on a file's size. The largest such file of a model, its tokenizer, has 11 MB."""

_LFS = b"version https://git-lfs.github.com/spec/"
POINTER = (
    "only a pointer of git-lfs, not the file itself; run git lfs pull there, or download the "
    "folder with hf download"
)
"""What is wrong with a pointer, and the remedy."""


# UTF-32 goes first: its little-endian mark begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_STAMP = r"(?:([0-9]{1,4}):)?([0-9]{1,4}):([0-9]{1,4}(?:[.,][0-9]{1,6})?)"
# Some files have a position on the screen after the times.
_TIMES = re.compile(rf"\s*{_STAMP}\s*-->\s*{_STAMP}(?:\s.*)?")
# "{\an8}" puts a line at the top of the screen.
_MARKUP = re.compile(r"</?[A-Za-z][^>]*>|\{\\[^}]*\}")


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
    """Return a message in one line of at most `most` characters. Errors may quote a file's
    content."""
    text = " ".join(str(error).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def read_text(path: str | os.PathLike, most: int = MOST_BYTES) -> str:
    """Read a file of UTF-8, or of what its byte order mark says. Lines end in "\\n".

    Raises:
        OSError: There is no such file, or it cannot be read.
        ForeignFileError: It has another encoding; see also `read_bytes`.
    """
    data = read_bytes(path, most)
    encoding = next((name for mark, name in _MARKS.items() if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ForeignFileError(
            f"{path}: its text cannot be decoded ({error}); save it as UTF-8"
        ) from error
    # English text in UTF-16 without a mark is also UTF-8, with a NUL at every other character.
    if "\0" in text:
        raise ForeignFileError(f"{path}: has NUL characters; save it as UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_srt(file: str | os.PathLike[str]) -> list[Subtitle]:
    """Read the entries of a SubRip file; see `parse_srt`.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ForeignFileError: It is neither UTF-8 nor has a byte order mark, or it has text but no line
            of times.
    """
    text = read_text(file)
    entries = parse_srt(text)
    if not entries and text.strip() and not any(map(_TIMES.fullmatch, text.splitlines())):
        raise ForeignFileError(
            f"{file}: has no line of times such as 00:01:13,500 --> 00:01:15,000; give an .srt file"
        )
    return entries


def parse_srt(text: str) -> list[Subtitle]:
    """Read the entries of a SubRip file's text, in the order of the file.

        12
        00:01:13,500 --> 00:01:15,000
        <i>Add the yeast</i>

    An entry ends at the next line of times, so it may contain blank lines. Text above the first
    line of times is skipped. Markup and entries without words are dropped. No text makes this
    raise.
    """
    entries = []
    lines = text.split("\n")
    starts = [i for i, line in enumerate(lines) if _TIMES.fullmatch(line)]
    for start, end in itertools.pairwise([*starts, len(lines)]):
        # The number of the next entry is directly above its times.
        last = end - 1 if end < len(lines) and lines[end - 1].strip().isdecimal() else end
        entry = _read_entry(lines[start], lines[start + 1 : last])
        if entry is not None:
            entries.append(entry)
    return entries


def _read_entry(times: str, lines: list[str]) -> Subtitle | None:
    stripped = [_MARKUP.sub("", line).strip() for line in lines]
    words = "\n".join(line for line in stripped if line)
    found = _TIMES.fullmatch(times)
    if not words or found is None:
        return None
    return Subtitle(_seconds(*found.group(1, 2, 3)), _seconds(*found.group(4, 5, 6)), words)


def _seconds(hours: str | None, minutes: str, seconds: str) -> float:
    return int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds.replace(",", "."))
