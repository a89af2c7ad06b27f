"""Reads subtitles: SubRip (.srt) files as entries with times and plain text.

Owns the grammar of a file. Refuses to guess: a block without a line of times is no entry, and a text that no time stands over is
not read. Invariant: no bytes whatever make `read_srt` raise; every entry has a text, without markup, in the order of the file.
"""

from __future__ import annotations

import dataclasses
import re

_STAMP = r"(?:([0-9]{1,4}):)?([0-9]{1,4}):([0-9]{1,4}(?:[.,][0-9]{1,6})?)"
_TIMES = re.compile(
    rf"\s*{_STAMP}\s*-->\s*{_STAMP}(?:\s.*)?"
)  # some files write a position after the times
_MARKUP = re.compile(r"<[^>]+>")


@dataclasses.dataclass(frozen=True)
class Subtitle:
    """What is said from `start` to `end` (seconds); lines are joined by line breaks."""

    start: float
    end: float
    text: str


def subtitle_line(entry: Subtitle) -> str:
    """One line of subtitles, as an agent reads it: "<12.5 seconds> words"."""
    return f"<{entry.start:.1f} seconds> {' '.join(entry.text.split())}"


def read_srt(data: bytes | str) -> list[Subtitle]:
    """The entries of a SubRip file. Bytes are read as UTF-8, and what is none is left out; entries without words are left out too."""
    text = data.decode("utf-8", errors="ignore") if isinstance(data, bytes) else data
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    entries = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.strip().split("\n")
        for i, line in enumerate(lines[:2]):  # a number stands before the times, or nothing
            if times := _TIMES.fullmatch(line):
                cleaned = [_MARKUP.sub("", line).strip() for line in lines[i + 1 :]]
                if words := "\n".join(line for line in cleaned if line):
                    entries.append(
                        Subtitle(
                            _seconds(*times.group(1, 2, 3)), _seconds(*times.group(4, 5, 6)), words
                        )
                    )
                break
    return entries


def _seconds(hours: str | None, minutes: str, seconds: str) -> float:
    return int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds.replace(",", "."))
