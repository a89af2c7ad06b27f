"""Reads the text files of users, such as subtitles in SubRip (.srt):

    12
    00:01:13,500 --> 00:01:15,000
    <i>Add the yeast</i>

An entry ends at the next line of times, so it may contain blank lines. Text above the first line of
times is skipped.
"""

from __future__ import annotations

import codecs
import itertools
import os
import re

from paravt_jax.data import foreign
from paravt_jax.data.foreign import ForeignFileError
from paravt_jax.method.records import Subtitle

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


def read_text(path: str | os.PathLike, most: int = foreign.MOST_BYTES) -> str:
    """Read a file of UTF-8, or of what its byte order mark says. Lines end in "\\n".

    Raises:
        OSError: There is no such file, or it cannot be read.
        ForeignFileError: It has another encoding; see also `foreign.read_bytes`.
    """
    data = foreign.read_bytes(path, most)
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

    Markup and entries without words are dropped. No text makes this raise.
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
