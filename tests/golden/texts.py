"""Readers of responses that share no code with what is tested, and small records for examples.

They find tags, answers, calls, letters and times with patterns of their own. The tests compare our
results with them where the reference is mistaken, and the recorded tables were written with them.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from typing import Any

import pytest

from paravt_jax.method.records import CropCall, Question, QuestionKind
from paravt_jax.method.tools.crop_video import read_seconds

BLOCKS = ("think", "tool_call", "tool_code", "tool_response", "answer")
ANY_TAG = "</?(?:" + "|".join(BLOCKS) + ")>"


def close(value: Any) -> Any:
    return pytest.approx(value, abs=1e-9)


# --- records ---


def floats(value: Any) -> Any:
    """A JSON value in which {"__float__": "nan"} and the like have become numbers."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: floats(part) for key, part in value.items()}
    if isinstance(value, list):
        return [floats(part) for part in value]
    return value


def question_of(record: dict) -> Question:
    """The question of a record of rewards.json."""
    kind = QuestionKind(record["question_type"])
    return Question(record["id"], "v", "?", kind, record["answer"])


# --- calls ---


def loads(body: str, strict: bool = True) -> Any:
    """The value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(body, strict=strict)
    except (ValueError, RecursionError):
        return None


def window(call: Any) -> CropCall | None:
    """The window of a call's JSON; None unless it is crop_video with two finite times."""
    if not isinstance(call, dict) or call.get("name") != "crop_video":
        return None
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = loads(arguments, strict=False)
    if not isinstance(arguments, dict):
        return None
    start = read_seconds(arguments.get("start_time"))
    end = read_seconds(arguments.get("end_time"))
    if start is None or end is None or not (math.isfinite(start) and math.isfinite(end)):
        return None
    return CropCall(start, end)


def windows(calls: list[Any]) -> list[CropCall]:
    return [found for found in map(window, calls) if found is not None]


def alone(text: str) -> list[CropCall]:
    """The windows of a text's `<tool_call>` blocks, each read on its own.

    A block goes from an opening tag to its closing one, without another opening tag in it.
    """
    inside = r"(?:(?!<tool_call>|<tool_code>).)*?"
    blocks = re.findall(rf"<tool_call>({inside})</tool_call>", text, re.DOTALL)
    return windows([loads(block, strict=False) for block in blocks])


# --- answers ---


def final_answer(text: str) -> str | None:
    """The last answer block with words and without tags in it.

    Blocks inside the closed blocks of other kinds do not count.
    """
    hidden: list[tuple[int, int]] = []
    for name in BLOCKS:
        if name != "answer":
            block = rf"<{name}>(?:(?!<{name}>).)*?</{name}>"
            hidden += [found.span() for found in re.finditer(block, text, re.DOTALL)]
    answers: list[str] = []
    for found in re.finditer(rf"<answer>((?:(?!{ANY_TAG}).)*)</answer>", text, re.DOTALL):
        inside = any(start < found.start() < end for start, end in hidden)
        if found[1].strip() and not inside:
            answers.append(found[1].strip())
    return answers[-1] if answers else None


def said(record: dict) -> str:
    """The answer that the release found in a record of rewards.json.

    Finding an answer and scoring it are tested apart: scores are about this one.
    """
    return record["expected"]["extract_answer"]


def bare(text: str) -> str:
    """A text without punctuation."""
    return re.sub(r"[^\w\s]", "", text)


# --- letters ---


def right_letter(record: dict) -> str | None:
    """The letter that is the right answer, if it is one of the four that the release knows."""
    letter = record["answer"].strip().upper()
    return letter if letter in ("A", "B", "C", "D") else None


def lone(text: str) -> str | None:
    """The letter, in upper case, that is all of a text."""
    found = re.fullmatch(r"(?i)\W*(?:the\s+)?([A-Z])\W*", text)
    return found[1].upper() if found else None


def paired(text: str) -> bool:
    """Whether two different letters are all of a text."""
    return bool(re.fullmatch(r"(?i)\W*([A-Z])\W{2,}(?!\1)[A-Z]\W*", text))


def standing(text: str) -> set[str]:
    """The capital letters that are words of a text."""
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
        r"(?:.*\W)?(?i:(?:must|should|would)\s+be|choose|pick|select|go\s+with|therefore|thus"
        rf"|hence|so|say)[:,]?\s+[(\[]?{others}{alone}{clause}",
        rf"(?:.*\W)?(?i:answer|option|choice)(?:\s+is|:)?\s+\(?(?i:{letter})\)?[.;]?",
        rf"{letter}选项.*",
        rf"(?s:.*)选\s*[(\[]?{letter}(?!\w){clause}",
        rf"[A-Z]{joint}{others}{alone}.*",
        rf"{alone}{joint}[A-Z](?![\w'’]).*",
    )
    return any(re.fullmatch(form, text.strip(), re.DOTALL) for form in forms)


def names(text: str) -> list[str]:
    """The letters that are words of a text and are named as options."""
    return [letter for letter in sorted(standing(text)) if named(text, letter)]


# --- times ---

_TIME = r"(?:\d+:)?\d+:[0-5]?\d(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+"


def clock(text: str) -> float:
    """Seconds of "12.5", "01:05" or "1:00:05", with a sign or without."""
    parts = enumerate(reversed(text.lstrip("-").split(":")))
    seconds = sum(float(part) * 60**i for i, part in parts)
    return -seconds if text.startswith("-") else seconds


def first_pair(text: str) -> list[float] | None:
    """The first two neighbouring times that a separator joins, in seconds.

    A minus with nothing before it is a sign.
    """
    pattern = r"(?<![\d.:])(?:[\d:]*:\d+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?![\d:]|\.\d)"
    joint = r".\s*(?:s|secs?|seconds?)?\s*(?:[,;~–—-]|\bto\b|\buntil\b|\band\b)\s*(-?)."
    times = list(re.finditer(pattern, text))
    for a, b in zip(times, times[1:], strict=False):
        between = re.fullmatch(joint, text[a.end() - 1 : b.start() + 1], re.I)
        if between and all(re.fullmatch(_TIME, time[0]) for time in (a, b)):
            sign = -1 if re.search(r"(?<![\w.:)\]-])-$", text[: a.start()]) else 1
            start, end = clock(a[0]), clock(b[0])
            return [sign * start, -end if between[1] else end]
    return labelled_pair(text)


def labelled_pair(text: str) -> list[float] | None:
    """The times behind a word for the start and a word for the end."""
    filler = r"(?:is|was|at|in|on|time|timestamp|around|about|the|seconds?)(?![A-Za-z])"
    words = rf"(?:[\s:=\"'_~]|{filler})*"
    labels = ("start(?:s|ed|ing)?|begin(?:s|ning)?", "end(?:s|ed|ing)?|finish(?:es|ed|ing)?")
    number = rf"(-?(?:{_TIME}))(?![\d:]|\.\d)"
    found = [re.search(rf"(?<![A-Za-z])(?:{label}){words}{number}", text, re.I) for label in labels]
    return [clock(match[1]) for match in found if match] if all(found) else None


def overlap(record: dict) -> float:
    """The overlap of the first ranges in a record's two texts, over what they cover together."""
    answer, right = (
        first_pair(unicodedata.normalize("NFKC", text)) for text in (said(record), record["answer"])
    )
    if answer is None or right is None or answer[0] >= answer[1] or right[0] >= right[1]:
        return 0.0
    both = max(min(answer[1], right[1]) - max(answer[0], right[0]), 0.0)
    return both / (answer[1] - answer[0] + right[1] - right[0] - both)


# --- the format reward ---

Readings = dict[str, bool]


def thought(text: str, ends: str) -> str:
    """The first think block up to its `</think>`, or without one up to the first of `ends`."""
    _, _, rest = text.partition("<think>")
    if "</think>" in rest:
        return rest.partition("</think>")[0].strip()
    return re.split(ends, rest, maxsplit=1)[0].strip()


def our_readings(text: str) -> Readings:
    """What R_fmt pays for, as it is read here."""
    before, opened, rest = text.partition("<think>")
    _, shut, rest = rest.partition("</think>")
    think = len(thought(text, ANY_TAG)) >= 10
    closed = think and bool(shut)
    return {
        "think": think,
        "answer": final_answer(text) is not None,
        "order": closed and bool(alone(rest)) and not alone(before),
        "closed": closed,
        "flow": closed and final_answer(rest) is not None,
        "left open": bool(opened) and not shut,
        "balance": all(text.count(f"<{name}>") == text.count(f"</{name}>") for name in BLOCKS),
    }


def summed(read: Readings, knobs: dict) -> float:
    """R_fmt of one response before it is cut to [0, 1] (REFERENCE 3)."""
    suffix = knobs["ANSWER_SUFFIX"] == "1"
    think = (0.2 if suffix else 0.3) * read["think"]
    answer = (0.5 if suffix else 0.3) * read["answer"]
    base = think + answer + 0.3 * read["order"]
    flow = 0.4 * read["closed"] + 0.3 * read["flow"] - 0.3 * read["left open"]
    anchor = float(knobs["ANCHOR_WEIGHT"]) * flow
    return base + anchor + 0.1 * (read["balance"] and base > 0)
