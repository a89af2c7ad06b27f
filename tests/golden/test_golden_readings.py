"""eval_parsing.json against our readings: letters, ranges, times, overlaps, subtitles."""

from __future__ import annotations

import math
import re

import pytest

from paravt_jax.data.foreign import parse_srt
from paravt_jax.method.accuracy import chosen_option, read_range
from paravt_jax.method.tools.crop_video import read_seconds
from tests.golden.conftest import Excuse
from tests.golden.texts import first_pair, floats, lone, named, names, paired, standing

# --- letters ---

CAPITALS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
RELEASED = frozenset("ABCDEFGHIJ")  # the letters that the release's evaluation knows


def said(record: dict) -> str:
    """The answer block, or without one the whole response."""
    block = re.search(r"<answer>(.*?)</answer>", record["input"], re.DOTALL)
    return (block[1] if block else record["input"]).strip()


def unsaid(record: dict, got: str | None) -> bool:
    """Whether only a lone letter, in either case, or a letter named as an option is read."""
    if got == lone(said(record)):
        return True
    return got is not None and named(said(record), got)


LETTERS = {
    # The answer has no option letter. The release's evaluation returns the first character of the
    # response.
    "no letter": Excuse(
        applies=lambda r: (
            bool(r["expected"])
            and not standing(r["input"]) & RELEASED
            and not (r["expected"] == said(r) and said(r) in CAPITALS)
        ),
        holds=unsaid,
    ),
    # The answer is in the answer block. The release's evaluation looks around it for a letter.
    "elsewhere": Excuse(
        applies=lambda r: (
            not standing(said(r)) & RELEASED and bool(standing(r["input"]) & RELEASED)
        ),
        holds=unsaid,
    ),
    # The first letter of a word is not an option. The release's evaluation takes it after 'answer
    # is'.
    "part of a word": Excuse(
        applies=lambda r: r["expected"] not in standing(r["input"]) and r["expected"] != said(r),
        holds=lambda r, got: got is None or got in standing(r["input"]),
    ),
    # Two letters and nothing else name two options. The release's evaluation takes the first.
    "one after another": Excuse(
        applies=lambda r: paired(said(r)),
        holds=lambda r, got: got is None,
    ),
    # If an answer has several letters, the one named as the option counts. The release takes the
    # first.
    "several": Excuse(
        applies=lambda r: len(standing(said(r))) > 1 and names(said(r)) != [r["expected"]],
        holds=lambda r, got: got is None or names(said(r)) == [got],
    ),
    # A letter that a sentence does not name as an option is a guess, and 'A' and 'I' are words.
    "in passing": Excuse(
        applies=lambda r: bool(standing(said(r))) and not names(said(r)),
        holds=lambda r, got: got is None,
    ),
}


def test_extract_letter(records, hold):
    hold(
        records("eval_parsing", "extract_letter"),
        lambda r: chosen_option(said(r)),
        lambda r, got: got == (r["expected"] or None),
        LETTERS,
        least=0.25,
    )


# --- times ---


def same(got: tuple[float, float] | None, expected: list[float] | None) -> bool:
    if got is None or expected is None:
        return got is None and expected is None
    return list(got) == pytest.approx(expected)


RANGES = {
    # Two numbers without a separator are no range: the release's evaluation takes any two. Hours,
    # 'to' and any order of clock times are read: it falls back to the single numbers in them. A
    # minus with nothing before it is a sign: it ignores it. The first range is the answer: it
    # prefers dashes, words and rising order.
    "another range": Excuse(
        applies=lambda r: (
            r["expected"] is not None and r["expected"] != pytest.approx(first_pair(r["input"]))
        ),
        holds=lambda r, got: same(got, first_pair(r["input"])),
    ),
}


def test_extract_time_from_response(records, hold):
    hold(
        records("eval_parsing", "extract_time_from_response"),
        lambda r: read_range(r["input"]),
        lambda r, got: same(got, r["expected"]),
        RANGES,
        least=0.4,
    )


def text_of(record: dict) -> str:
    return record["input"].strip() if isinstance(record["input"], str) else ""


PLAIN_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
CLOCK = r"(?:[0-9]+:)?[0-9]+:[0-5]?[0-9](?:\.[0-9]+)?"


def unit_number(text: str) -> float:
    """The number before a unit of seconds; 0 without a number and unit."""
    found = re.fullmatch(rf"({PLAIN_NUMBER})\s*(?:s|secs?|seconds?)", text, re.IGNORECASE)
    return float(found[1]) if found else 0.0


VALUES = {
    # True and false are not times.
    "true and false": Excuse(
        applies=lambda r: isinstance(r["input"], bool),
        holds=lambda r, got: got is None,
    ),
    # An integer too large for a float is infinite, and no window. The release raises.
    "raises": Excuse(
        applies=lambda r: r["error"] is not None,
        holds=lambda r, got: got == math.inf,
    ),
    # Seconds may have their unit. The release reads them as 0.
    "units": Excuse(
        applies=lambda r: unit_number(text_of(r)) != 0,
        holds=lambda r, got: got == unit_number(text_of(r)),
    ),
    # A clock time has at most 59 seconds, whole minutes and no sign.
    "no clock": Excuse(
        applies=lambda r: ":" in text_of(r) and not re.fullmatch(CLOCK, text_of(r)),
        holds=lambda r, got: got is None,
    ),
    # A number is ASCII digits with at most one point. The release takes everything that Python
    # reads as a float.
    "spellings": Excuse(
        applies=lambda r: (
            isinstance(r["input"], str)
            and ":" not in r["input"]
            and r["expected"] != 0.0
            and not re.fullmatch(PLAIN_NUMBER, text_of(r))
        ),
        holds=lambda r, got: got is None,
    ),
    # A text that is no time is refused, and the model is told. The release reads it as 0.
    "nothing": Excuse(
        applies=lambda r: (
            r["expected"] == 0.0
            and not isinstance(floats(r["input"]), int | float)
            and not re.fullmatch(rf"{PLAIN_NUMBER}\s*(?i:s|secs?|seconds?)?|{CLOCK}", text_of(r))
        ),
        holds=lambda r, got: got is None,
    ),
}


def test_parse_time_val(records, hold):
    def agrees(record: dict, got: float | None) -> bool:
        return got is not None and got == pytest.approx(
            floats(record["expected"]), abs=1e-9, nan_ok=True
        )

    table = records("eval_parsing", "parse_time_val")
    hold(table, lambda r: read_seconds(floats(r["input"])), agrees, VALUES, least=0.3)


# --- subtitles ---


def blocks(record: dict) -> list[list[str]]:
    text = record["input"].replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff")
    return [block.strip().split("\n") for block in re.split(r"\n\s*\n", text.strip())]


def timed(line: str) -> bool:
    """Whether a line has two times with an arrow between them, perhaps followed by a position."""
    clock = r"\s*(?:\d{1,4}:)?\d{1,4}:\d{1,4}(?:[,.]\d+)?"
    return bool(re.fullmatch(rf"{clock}\s*-->{clock}(?:\s.*)?", line))


def words(lines: list[str]) -> list[str]:
    return [line for line in (re.sub("<[^>]+>", "", line).strip() for line in lines) if line]


def below_times(record: dict) -> str:
    """The lines below a block's times, which are its first or second line."""
    below = []
    for block in blocks(record):
        if timed(block[0]):
            below += words(block[1:])
        elif len(block) > 1 and timed(block[1]):
            below += words(block[2:])
    return "\n".join(below)


SUBTITLES = {
    # Lines without times above them are no subtitles: the release takes the text after any two
    # lines. An entry without its number is read: it takes its first line of text for the times.
    "other lines": Excuse(
        applies=lambda r: r["expected"] != below_times(r),
        holds=lambda r, got: got == below_times(r),
    ),
}


def test_parse_srt(records, hold):
    hold(
        records("eval_parsing", "parse_srt"),
        lambda r: "\n".join(entry.text for entry in parse_srt(r["input"])),
        lambda r, got: got == r["expected"],
        SUBTITLES,
        least=0.3,
    )
