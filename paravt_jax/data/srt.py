"""Reads SubRip (.srt) files.

    12
    00:01:13,500 --> 00:01:15,000
    <i>Add the yeast</i>

Text without a line of times above it is skipped.
"""

from __future__ import annotations

import os
import re

from paravt_jax.data.foreign import ForeignFileError
from paravt_jax.data.text_files import read_text
from paravt_jax.method.subtitles import Subtitle

_STAMP = r"(?:([0-9]{1,4}):)?([0-9]{1,4}):([0-9]{1,4}(?:[.,][0-9]{1,6})?)"
# Some files have a position on the screen after the times.
_TIMES = re.compile(rf"\s*{_STAMP}\s*-->\s*{_STAMP}(?:\s.*)?")
# "{\an8}" puts a line at the top of the screen.
_MARKUP = re.compile(r"<[^>]+>|\{\\[^}]*\}")


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
    for block in re.split(r"\n\s*\n", text.strip()):
        entry = _read_block(block.strip().split("\n"))
        if entry is not None:
            entries.append(entry)
    return entries


def _read_block(lines: list[str]) -> Subtitle | None:
    # The times are in the first line, or in the second below a number.
    for i, line in enumerate(lines[:2]):
        times = _TIMES.fullmatch(line)
        if times is None:
            continue
        stripped = [_MARKUP.sub("", line).strip() for line in lines[i + 1 :]]
        words = "\n".join(line for line in stripped if line)
        if not words:
            return None
        start = _seconds(*times.group(1, 2, 3))
        end = _seconds(*times.group(4, 5, 6))
        return Subtitle(start, end, words)
    return None


def _seconds(hours: str | None, minutes: str, seconds: str) -> float:
    return int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds.replace(",", "."))
