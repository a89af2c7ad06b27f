"""Options that carry their letters: "A. a car", "(B) a boat"."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

# An option behind its letter: "(A) one", "A. one", "A) one", "a: one".
_LETTER = r"\s*(?:\(([A-Za-z])\)|([A-Za-z])[.):])"
_OPTION = re.compile(_LETTER + r"\s*(.*)", re.DOTALL)
_LINE = re.compile(_LETTER + r"[ \t]*(.*)")


def without_letters(options: Sequence[str]) -> list[str]:
    """Remove the letters before options if they are A, B, C, ... in order.

    In ("A. Lincoln", "B. Obama", "A. Smith") they belong to the names and stay.
    """
    return _words(options, _OPTION) or list(options)


def split_options(text: str) -> tuple[str, tuple[str, ...]]:
    """Split a text into the question and the options in its last lines.

    Every option is a line that starts with its letter, from A on. If the text does not end with
    such lines, all of it is the question.
    """
    lines = text.strip().split("\n")
    # The first line belongs to the question. Take the first line at which the options can start.
    for first in range(1, len(lines) - 1):
        options = _words(lines[first:], _LINE)
        if options:
            return "\n".join(lines[:first]).strip(), tuple(options)
    return text.strip(), ()


def _words(texts: Sequence[str], pattern: re.Pattern[str]) -> list[str]:
    """Return the texts without their letters; empty unless they have the letters A, B, C, ... in
    order."""
    matches = [match for match in map(pattern.fullmatch, texts) if match and match[3].strip()]
    letters = "".join(match[1] or match[2] for match in matches)
    if len(matches) < len(texts) or not any(
        alphabet.startswith(letters)
        for alphabet in (string.ascii_uppercase, string.ascii_lowercase)
    ):
        return []
    return [match[3].strip() for match in matches]
