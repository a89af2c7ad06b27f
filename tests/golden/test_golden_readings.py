"""eval_parsing.json against our readings: letters, ranges, times, overlaps, subtitles.

Each table has a table of excuses beside its test; what is true instead is read from the record by a reader of the test's own.
"""

from __future__ import annotations

import functools
import math
import re

import numpy as np
import pytest

from paravt_jax.method.accuracy import chosen_option, grounding_accuracy, read_range
from paravt_jax.method.subtitles import read_srt
from paravt_jax.method.tools.crop_video import read_seconds
from tests.golden.conftest import Excuse, check_examples
from tests.golden.test_golden_parsing import floats, response

# Letters -------------------------------------------------------------------------------------------------------------------------

CAPITALS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
RELEASED = frozenset("ABCDEFGHIJ")  # the letters that the release's evaluation knows


def said(record: dict) -> str:
    """The answer block where there is one, else the whole response."""
    block = re.search(r"<answer>(.*?)</answer>", record["input"], re.DOTALL)
    return (block[1] if block else record["input"]).strip()


def standing(text: str) -> set[str]:
    """The capital letters that stand alone in a text."""
    return set(re.findall(r"(?<![A-Za-z0-9_])[A-Z](?![A-Za-z0-9_])", text))


def named(text: str, letter: str) -> bool:
    """Whether a text names a letter as an option.

    By itself, in front, in parentheses, in a box, after a word for it, or beside a second letter.
    """
    # "A" and "I" before a word are words.
    guard = r"(?!\s+(?!(?:and|or|because|since|as|but|is|are)\b)\w)" if letter in "AI" else ""
    alone = rf"{letter}(?![\w'’]){guard}"
    joint = r"[)\]]?\s*(?:,|/|&|\band\b|\bor\b)\s*[(\[]?"
    others = rf"(?:[A-Z]{joint})*"
    clause = rf"(?:{joint}[A-Z])*" r"(?:\W*|(?:\s*[.,;:!?)\]]|\s+(?:because|since|as|but)\b).*)"
    forms = (
        rf"\W*(?:(?i:the)\s+)?{letter}\W*",
        rf"[(\[]?(?i:{letter})[.):,\]](?!\w).*",
        rf"{letter}\s+[-–—].*",
        rf"{alone}\s+(?:because|since|due\s+to|is\s+(?:the\s+)?(?:answer|best|correct|right)).*",
        rf"(?:.*\W)?(?i:answer|option|choice)(?:\s+is)?\s*:?\s*[(\[]?{others}{alone}.*",
        rf".*答案[是为]?\s*:?\s*[(\[]?{others}{alone}.*",
        rf".*\({letter}\).*",
        rf".*\\boxed\{{\W*{letter}\W*\}}.*",
        rf"(?:.*\W)?(?i:it|that|this)(?:\s+is|['’]s)[:,]?\s*[(\[]?{others}{alone}{clause}",
        r"(?:.*\W)?(?i:(?:must|should|would)\s+be|choose|pick|select|go\s+with|therefore|thus|hence|so)"
        rf"[:,]?\s+[(\[]?{others}{alone}{clause}",
        rf"(?s:.*)选\s*[(\[]?{letter}(?!\w){clause}",
        rf"[A-Z]{joint}{others}{alone}.*",
        rf"{alone}{joint}[A-Z](?![\w'’]).*",
    )
    return any(re.fullmatch(form, text.strip(), re.DOTALL) for form in forms)


def names(text: str) -> list[str]:
    """The letters that stand in a text and are named as options."""
    return [letter for letter in sorted(standing(text)) if named(text, letter)]


def unsaid(record: dict, got: str | None) -> bool:
    """No letter is made of what is no letter; one alone is read in either case."""
    lone = re.fullmatch(r"\W*(?:the\s+)?([A-Za-z])\W*", said(record))
    return got == (lone[1].upper() if lone else None) or (
        got is not None and named(said(record), got)
    )


LETTERS = {
    "no letter": Excuse(
        "no option letter stands in the answer; the release's evaluation gives the first character of the response",
        lambda r: (
            bool(r["expected"])
            and not standing(r["input"]) & RELEASED
            and not (r["expected"] == said(r) and said(r) in CAPITALS)
        ),
        unsaid,
        response("<answer>none</answer>", "<"),
        response("B", "B"),
        "N",
    ),
    "elsewhere": Excuse(
        "the answer stands in the answer block; the release's evaluation looks around it for a letter",
        lambda r: not standing(said(r)) & RELEASED and bool(standing(r["input"]) & RELEASED),
        unsaid,
        response("<answer>none</answer> E", "E"),
        response("<think>B or C</think><answer>C</answer>", "C"),
        "E",
    ),
    "part of a word": Excuse(
        "a letter with which a word begins is none; the release's evaluation takes it after 'answer is'",
        lambda r: r["expected"] not in standing(r["input"]) and r["expected"] != said(r),
        lambda r, got: got is None or got in standing(r["input"]),
        response("A: the answer is BY", "B"),
        response("the answer is B", "B"),
        "B",
    ),
    "one after another": Excuse(
        "two letters and nothing else name two options; the release's evaluation takes the first",
        lambda r: bool(re.fullmatch(r"(?i)\W*([A-Z])\W{2,}(?!\1)[A-Z]\W*", said(r))),
        lambda r, got: got is None,
        response("A. B.", "A"),
        response("A. Bees", "A"),
        "A",
    ),
    "several": Excuse(
        "where several letters stand in an answer, the one that is named as the option counts; the release takes the first",
        lambda r: len(standing(said(r))) > 1 and names(said(r)) != [r["expected"]],
        lambda r, got: got is None or names(said(r)) == [got],
        response("A or B", "A"),
        response("(A)", "A"),
        "A",
    ),
    "in passing": Excuse(
        "a letter in a sentence that does not name it as the option is a guess, and 'A' and 'I' are words",
        lambda r: bool(standing(said(r))) and not names(said(r)),
        lambda r, got: got is None,
        response("A man walks", "A"),
        response("Option A", "A"),
        "A",
    ),
}


def read_letter(record: dict) -> str | None:
    return chosen_option(said(record))


def test_extract_letter(records, hold):
    hold(
        records("eval_parsing", "extract_letter"),
        read_letter,
        lambda r, got: got == (r["expected"] or None),
        LETTERS,
        least=0.25,
    )


def test_excuses_of_letters():
    check_examples(read_letter, LETTERS)


# Times ---------------------------------------------------------------------------------------------------------------------------


def first_pair(text: str) -> list[float] | None:
    """The first two neighbouring times that a separator joins, in seconds; a minus with nothing before it is a sign."""
    times = list(
        re.finditer(r"(?<![\d.:])(?:[\d:]*:\d+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?![\d:]|\.\d)", text)
    )
    for a, b in zip(times, times[1:], strict=False):
        between = re.fullmatch(
            r".\s*(?:s|secs?|seconds?)?\s*(?:[,;~–—-]|\bto\b|\buntil\b|\band\b)\s*(-?).",
            text[a.end() - 1 : b.start() + 1],
            re.I,
        )
        if between and all(
            re.fullmatch(r"(?:\d+:)?\d+:[0-5]?\d(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+", t[0])
            for t in (a, b)
        ):
            sign = -1 if re.search(r"(?<![\w.:)\]-])-$", text[: a.start()]) else 1
            seconds = [clock(t[0]) for t in (a, b)]
            return [sign * seconds[0], -seconds[1] if between[1] else seconds[1]]
    return labelled_pair(text)


def labelled_pair(text: str) -> list[float] | None:
    """The times behind a word for the start and one for the end."""
    words = (
        r"(?:[\s:=\"'_~]|(?:is|was|at|in|on|time|timestamp|around|about|the|seconds?)(?![A-Za-z]))*"
    )
    labels = ("start(?:s|ed|ing)?|begin(?:s|ning)?", "end(?:s|ed|ing)?|finish(?:es|ed|ing)?")
    number = r"(-?(?:(?:\d+:)?\d+:[0-5]?\d(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+))(?![\d:]|\.\d)"
    found = [re.search(rf"(?<![A-Za-z])(?:{label}){words}{number}", text, re.I) for label in labels]
    return [clock(match[1]) for match in found if match] if all(found) else None


def clock(text: str) -> float:
    """Seconds of "12.5", "01:05" or "1:00:05", with a sign or without."""
    parts = enumerate(reversed(text.lstrip("-").split(":")))
    return (-1 if text.startswith("-") else 1) * sum(float(part) * 60**i for i, part in parts)


def pair(record: dict) -> list[float] | None:
    return first_pair(record["input"])


def other_than_read(record: dict) -> bool:
    return (
        record["expected"] is not None
        and pair(record) is not None
        and record["expected"] != pytest.approx(pair(record))
    )


def same(got: tuple[float, float] | None, expected: list[float] | None) -> bool:
    return (
        got is None and expected is None
        if got is None or expected is None
        else list(got) == pytest.approx(expected)
    )


SPAN = response("12.5 - 20", [12.5, 20.0])

RANGES = {
    "no range": Excuse(
        "two numbers that nothing joins are no range; the release's evaluation takes any two",
        lambda r: r["expected"] is not None and pair(r) is None,
        lambda r, got: got is None,
        response("frame 5, later frame 9", [5.0, 9.0]),
        SPAN,
        (5.0, 9.0),
    ),
    "clock": Excuse(
        "hours, 'to' and any order of clock times are read; the release's evaluation falls back to their single numbers",
        lambda r: other_than_read(r) and bool(re.search(r"\d:\d", r["input"])),
        lambda r, got: same(got, pair(r)),
        response("1:00:05 - 1:00:10", [5.0, 60.0]),
        response("1:05 - 1:20", [65.0, 80.0]),
        (5.0, 60.0),
    ),
    "signs": Excuse(
        "a minus with nothing before it is a sign; in the release's evaluation it is none",
        lambda r: other_than_read(r) and bool(re.search(r"(?:^|[\s(\[,–-])-\.?\d", r["input"])),
        lambda r, got: same(got, pair(r)),
        response("-5 - 10", [5.0, 10.0]),
        response("5 - 10", [5.0, 10.0]),
        (5.0, 10.0),
    ),
    "first": Excuse(
        "the first range is the answer as it stands; the release's evaluation prefers dashes, words and rising order",
        other_than_read,
        lambda r, got: same(got, pair(r)),
        response("clip 3: 20 - 12", [3.0, 20.0]),
        SPAN,
        (3.0, 20.0),
    ),
}


def read_times(record: dict) -> tuple[float, float] | None:
    return read_range(record["input"])


def test_extract_time_from_response(records, hold):
    table = records("eval_parsing", "extract_time_from_response")
    hold(table, read_times, lambda r, got: same(got, r["expected"]), RANGES, least=0.4)


def test_excuses_of_ranges():
    check_examples(read_times, RANGES)


def text_of(record: dict) -> str:
    return record["input"].strip() if isinstance(record["input"], str) else ""


PLAIN_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
CLOCK = r"(?:[0-9]+:)?[0-9]+:[0-5]?[0-9](?:\.[0-9]+)?"


def unit_number(text: str) -> float:
    """The number before a unit of seconds; 0 where there is no such thing."""
    found = re.fullmatch(rf"({PLAIN_NUMBER})\s*(?:s|secs?|seconds?)", text, re.IGNORECASE)
    return float(found[1]) if found else 0.0


VALUES = {
    "true and false": Excuse(
        "true and false are no times",
        lambda r: isinstance(r["input"], bool),
        lambda r, got: got is None,
        response(True, 1.0),
        response(1, 1.0),
        1.0,
    ),
    "raises": Excuse(
        "an integer too large for a float raises in the release; here it is infinite, and no window",
        lambda r: r["error"] is not None,
        lambda r, got: got == math.inf,
        {"id": "example", "input": 10**400, "expected": None, "error": "OverflowError"},
        response(10**4, 10.0**4),
        None,
    ),
    "units": Excuse(
        "seconds may carry their unit; with it they are 0 in the release",
        lambda r: unit_number(text_of(r)) != 0,
        lambda r, got: got == unit_number(text_of(r)),
        response("12s", 0.0),
        response("12", 12.0),
        0.0,
    ),
    "no clock": Excuse(
        "a clock time has at most 59 seconds, whole minutes and no sign",
        lambda r: ":" in text_of(r) and not re.fullmatch(CLOCK, text_of(r)),
        lambda r, got: got is None,
        response("-1:30", -30.0),
        response("1:30", 90.0),
        -30.0,
    ),
    "spellings": Excuse(
        "a number is ASCII digits with at most one point; the release takes whatever Python calls a float",
        lambda r: (
            isinstance(r["input"], str)
            and ":" not in r["input"]
            and r["expected"] != 0.0
            and not re.fullmatch(PLAIN_NUMBER, text_of(r))
        ),
        lambda r, got: got is None,
        response("nan", {"__float__": "nan"}),
        response("7.5", 7.5),
        math.nan,
    ),
    "nothing": Excuse(
        "what is no time is none, and the model is told; in the release it is 0",
        lambda r: (
            r["expected"] == 0.0
            and not isinstance(floats(r["input"]), int | float)
            and not re.fullmatch(rf"{PLAIN_NUMBER}\s*(?i:s|secs?|seconds?)?|{CLOCK}", text_of(r))
        ),
        lambda r, got: got is None,
        response("abc", 0.0),
        response("0:0", 0.0),
        0.0,
    ),
}


def read_value(record: dict) -> float | None:
    return read_seconds(floats(record["input"]))


def test_parse_time_val(records, hold):
    def agrees(record: dict, got: float | None) -> bool:
        return got is not None and got == pytest.approx(
            floats(record["expected"]), abs=1e-9, nan_ok=True
        )

    hold(records("eval_parsing", "parse_time_val"), read_value, agrees, VALUES, least=0.3)


def test_excuses_of_values():
    check_examples(read_value, VALUES)


IOUS = {
    "own words": Excuse(
        "the answer's own words always score 1, even where they are no range",
        lambda r: r["input"][0] == r["input"][1] and r["input"][0][0] >= r["input"][0][1],
        lambda r, got: got == 1,
        response([[5, 5], [5, 5]], 0.0),
        response([[5, 5], [5, 6]], 0.0),
        0.0,
    )
}


def overlap(record: dict) -> float:
    write = functools.partial(np.format_float_positional, trim="-")
    return grounding_accuracy(
        *(f"[{write(float(start))}, {write(float(end))}]" for start, end in record["input"])
    )


def test_temporal_iou(records, hold):
    table = records("eval_parsing", "temporal_iou")
    hold(table, overlap, lambda r, got: got == pytest.approx(r["expected"], abs=1e-9), IOUS)


def test_excuses_of_overlaps():
    check_examples(overlap, IOUS)


# Subtitles -----------------------------------------------------------------------------------------------------------------------


def blocks(record: dict) -> list[list[str]]:
    text = record["input"].replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff")
    return [block.strip().split("\n") for block in re.split(r"\n\s*\n", text.strip())]


def timed(line: str) -> bool:
    """Whether a line gives times: two clock readings and an arrow between, perhaps a position after them."""
    clock = r"\s*(?:\d{1,4}:)?\d{1,4}:\d{1,4}(?:[,.]\d+)?"
    return bool(re.fullmatch(rf"{clock}\s*-->{clock}(?:\s.*)?", line))


def words(lines: list[str]) -> list[str]:
    return [line for line in (re.sub("<[^>]+>", "", line).strip() for line in lines) if line]


def below_times(record: dict, got: str) -> bool:
    """What is read is each line below a line of times, which is the first or the second of its block."""
    below = []
    for block in blocks(record):
        if timed(block[0]) or any(map(timed, block[1:2])):
            below += words(block[1 if timed(block[0]) else 2 :])
    return got == "\n".join(below)


TIMED = response("1\n00:00:01,000 --> 00:00:02,000\nwords", "words")

SUBTITLES = {
    "no times": Excuse(
        "lines that no times stand over are no subtitles; the release takes what follows any two lines",
        lambda r: any(words(block[2:]) and not any(map(timed, block[:2])) for block in blocks(r)),
        below_times,
        response("a\nb\nc", "c"),
        TIMED,
        "c",
    ),
    "no number": Excuse(
        "an entry without its number is read; the release takes its first line of text for the times",
        lambda r: any(timed(block[0]) and words(block[1:2]) for block in blocks(r)),
        below_times,
        response("00:00:01,000 --> 00:00:02,000\nwords", ""),
        TIMED,
        "",
    ),
}


def read_subtitles(record: dict) -> str:
    return "\n".join(entry.text for entry in read_srt(record["input"].encode()))


def test_parse_srt(records, hold):
    hold(
        records("eval_parsing", "parse_srt"),
        read_subtitles,
        lambda r, got: got == r["expected"],
        SUBTITLES,
        least=0.3,
    )


def test_excuses_of_subtitles():
    check_examples(read_subtitles, SUBTITLES)
