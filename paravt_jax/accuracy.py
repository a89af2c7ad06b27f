"""Is the answer right: multiple choice, temporal grounding, open-ended.

Owns R_acc. Refuses to be lenient where leniency pays for guessing: an answer that names two options, or no readable range,
earns nothing. Invariant: every score lies in [0, 1], and the answer's own words always score 1 (REFERENCE 3; the mends of
REFERENCE 4, point 12, are here).
"""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

from paravt_jax.records import Question, QuestionKind

# Commas that group thousands go; the point of a decimal and the sign of a number stay: "1.5" is not "15", ".5" not "5", "-5" not "5".
_PUNCTUATION = re.compile(r"(?<=\d),(?=\d{3}(?!\d))|(?!(?<![^\W\d])(?<!\.)\.(?=\d))(?!(?<!\w)-(?=\.?\d))[^\w\s]")
_ARTICLES = frozenset(("a", "an", "the"))

_BARE_LETTER = re.compile(r"\W*(?:(?i:the)\s+)?([A-Za-z])\W*")
_LEADING_LETTER = re.compile(r"\s*(?:\(([A-Za-z])\)|\[([A-Za-z])\]|([A-Za-z])[.):,]|([A-Z])\s+[-–—])(?!\w)")
_NAMED_LETTER = re.compile(r"(?:(?i:\b(?:answer|option|choice))(?:\s+is)?|答案[是为]?)\s*:?\s*[(\[]?([A-Z])\b|\(([A-Z])\)")

_TIME = r"(?<![\d.:])(?:\d+:)?\d+:[0-5]?\d(?:\.\d+)?|(?<![\d.:])\d+(?:\.\d*)?|(?<![\d.:])\.\d+"
_UNIT = r"\s*(?:(?:s|secs?|seconds?)\b)?\s*"
_SIGN = r"(?<![\w.:)\]-])-"  # a minus with nothing before it; elsewhere it is a dash between two times
_RANGE = re.compile(
    rf"(?P<a>(?:{_SIGN})?(?:{_TIME})){_UNIT}(?:,|-|–|—|~|;|\bto\b|\buntil\b|\band\b)\s*(?P<b>-?(?:{_TIME}))(?![\d:]|\.\d)", re.IGNORECASE
)


def normalise(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces. Articles stay where nothing else would be left: option "A" is a word."""
    words = _PUNCTUATION.sub("", unicodedata.normalize("NFKC", text).lower()).split()
    return " ".join([word for word in words if word not in _ARTICLES] or words)


def exact_match(prediction: str, answer: str) -> bool:
    """Equal after `normalise`, and not both nothing."""
    return normalise(prediction) == normalise(answer) != ""


def token_f1(prediction: str, answer: str) -> float:
    """F1 of the words of two texts: the shared kinds of words over each text's length (REFERENCE 3)."""
    p, a = normalise(prediction).split(), normalise(answer).split()
    shared = len(set(p) & set(a))
    return 2 * shared / (len(p) + len(a)) if shared else 0.0


def _letter(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group).upper()


def chosen_letter(text: str) -> str | None:
    """The one option letter that an answer names, upper case; None where it names none or several.

    Read: a letter alone, "(B)", "B. a dog", "Option B", "the answer is B". An article ("A dog runs") is no letter.
    """
    if alone := _BARE_LETTER.fullmatch(text):
        return alone.group(1).upper()
    letters = {_letter(named) for named in _NAMED_LETTER.finditer(text)}
    if leading := _LEADING_LETTER.match(text):
        letters.add(_letter(leading))
        if another := _BARE_LETTER.fullmatch(text, leading.end()):  # "A. B." names two
            letters.add(another.group(1).upper())
    return letters.pop() if len(letters) == 1 else None


def _choice(text: str, options: tuple[str, ...]) -> str | None:
    """The letter of the option that a text stands for, by its words or by its letter; None where the two disagree."""
    lead = _LEADING_LETTER.match(text)
    for i, option in enumerate(options):
        own = _LEADING_LETTER.match(option)
        words, letter = option[own.end() :] if own else option, chr(ord("A") + i)
        if exact_match(text, words):
            return letter
        if lead and exact_match(text[lead.end() :], words):
            return letter if _letter(lead) == letter else None
    return chosen_letter(text)


def choice_accuracy(prediction: str, answer: str, options: tuple[str, ...] = ()) -> float:
    """1 where a multiple-choice answer names the right option, by letter or by its words, and no other; else 0."""
    prediction, answer = (unicodedata.normalize("NFKC", text) for text in (prediction, answer))  # a letter of another width is that letter
    alone = re.fullmatch("[a-z]", normalise(answer))  # read as a letter below, or "(A) (B)" would be "b" without its article
    if exact_match(prediction, answer) and (not alone or prediction == answer):
        return 1.0
    wanted = _choice(answer, options)
    return float(wanted is not None and _choice(prediction, options) == wanted)


def _seconds(text: str) -> float:
    sign, text = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    total = 0.0
    for part in text.split(":"):
        total = total * 60 + float(part)
    return sign * total


def read_range(text: str) -> tuple[float, float] | None:
    """The first range of seconds in a text: "[10, 20]", "10 - 20", "from 10 to 20 s", "[00:10, 00:20]". None where there is none."""
    found = _RANGE.search(unicodedata.normalize("NFKC", text))
    return (_seconds(found["a"]), _seconds(found["b"])) if found else None


def grounding_accuracy(prediction: str, answer: str) -> float:
    """Intersection over union of two ranges of seconds; 0 where one is unreadable, reversed or empty, 1 for the answer's own words."""
    if exact_match(prediction, answer):
        return 1.0
    p, a = read_range(prediction), read_range(answer)
    if p is None or a is None or p[0] >= p[1] or a[0] >= a[1]:
        return 0.0
    inter = min(p[1], a[1]) - max(p[0], a[0])
    return max(inter, 0.0) / (max(p[1], a[1]) - min(p[0], a[0])) if inter > 0 else 0.0


def accuracy(question: Question, prediction: str | None, open_ended: Literal["f1", "exact"] = "f1") -> float:
    """R_acc in [0, 1] of an answer's text; no answer scores 0."""
    if prediction is None:
        return 0.0
    if question.kind is QuestionKind.MULTIPLE_CHOICE:
        return choice_accuracy(prediction, question.answer, question.options)
    if question.kind is QuestionKind.TEMPORAL_GROUNDING:
        return grounding_accuracy(prediction, question.answer)
    if exact_match(prediction, question.answer):
        return 1.0
    return token_f1(prediction, question.answer) if open_ended == "f1" else 0.0
