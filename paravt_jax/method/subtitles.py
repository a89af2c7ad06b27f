"""Subtitles: entries with times and plain text. `paravt_jax.data.srt` reads them from files."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Subtitle:
    """One entry: text of one or more lines, shown from `start` to `end` in seconds."""

    start: float
    end: float
    text: str


def subtitle_line(entry: Subtitle) -> str:
    """Write an entry in the form that agents read: "<12.5 seconds> words"."""
    return f"<{entry.start:.1f} seconds> {' '.join(entry.text.split())}"
