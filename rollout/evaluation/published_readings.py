"""Scores an answer as the release's evaluation reads it, beside this project's own score.

The release takes a letter or two times from almost any text, so its score can differ from ours on
the same transcript. Both are stored, because a published number contains its reading. The rules
were found by running the release (docs/reference.md, section 4); tests compare them with its
results.

Its evaluation reads the whole last turn for a letter. For times, the answer block is read if there
is one: the release's own models write one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from paravt_jax.method.accuracy import overlap, read_range
from paravt_jax.method.records import Question, QuestionKind, Turn

RELEASE = "release"
"""Name of the release's reading in lines, summaries and tables."""

_BLOCK = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LETTER = re.compile(r"\b[A-J]\b")
_ANSWER_IS = re.compile(r"(?i:answer)\s*(?:(?i:is)|:)?\s*\(?([A-J])")

_NUMBER = r"\d+(?:\.\d*)?"
_CLOCK = r"(\d{1,2}):([0-5]\d(?:\.\d+)?)"
_DASH = r"\s*[-–—]\s*"
_CLOCKS = re.compile(rf"(?<!\d)(?=[0-5]?\d:){_CLOCK}{_DASH}(?=[0-5]?\d:){_CLOCK}")
_PAIR = re.compile(rf"({_NUMBER}){_DASH}({_NUMBER})")
_START = re.compile(rf"(?i:start|begin)\D*?({_NUMBER})")
_END = re.compile(rf"(?i:end|finish)\D*?({_NUMBER})")


def released_letter(response: str) -> str:
    """The option that the release reads in a response; any other character if it names none.

    The first capital from A to J that stands alone in the answer block counts, then one after
    "answer is", then any that stands alone, and at last the first character of the text.
    """
    text = response.strip()
    block = _BLOCK.search(text)
    inside = _LETTER.search(block[1]) if block else None
    if inside:
        return inside[0]
    said = _ANSWER_IS.search(text)
    if said:
        return said[1]
    standing = _LETTER.search(text)
    return standing[0] if standing else text[:1]


def released_range(response: str) -> tuple[float, float] | None:
    """The range of seconds that the release reads in a response; None for fewer than two numbers.

    Two times "m:ss" joined by a dash count, then two numbers joined by a dash, then a labelled
    start and end, each only if the first is before the second. Otherwise the first two numbers
    count, in the order in which they stand.
    """
    clocks = _CLOCKS.search(response)
    pair = _PAIR.search(response)
    labels = (_START.search(response), _END.search(response))
    candidates: list[tuple[float, float]] = []
    if clocks:
        times = [float(part) for part in clocks.groups()]
        candidates.append((60 * times[0] + times[1], 60 * times[2] + times[3]))
    if pair:
        candidates.append((float(pair[1]), float(pair[2])))
    if labels[0] and labels[1]:
        candidates.append((float(labels[0][1]), float(labels[1][1])))
    for start, end in candidates:
        if start < end:
            return start, end
    numbers = re.findall(_NUMBER, response)
    return (float(numbers[0]), float(numbers[1])) if len(numbers) > 1 else None


def released_score(question: Question, turns: Sequence[Turn]) -> float | None:
    """The score of an episode under the release's reading, in [0, 1].

    None for a question that the release's rules do not cover: an open-ended one, or one whose right
    answer is not a letter.
    """
    response = turns[-1].text if turns else ""
    if question.kind is QuestionKind.MULTIPLE_CHOICE and len(question.answer) == 1:
        return float(released_letter(response) == question.answer)
    if question.kind is QuestionKind.TEMPORAL_GROUNDING:
        block = _BLOCK.search(response)
        right = read_range(question.answer)
        predicted = released_range(block[1] if block else response)
        return overlap(predicted, right) if predicted and right else 0.0
    return None


def other_scores(question: Question, turns: Sequence[Turn]) -> dict[str, float]:
    """Scores of an episode under readings other than ours, by the reading's name."""
    released = released_score(question, turns)
    return {} if released is None else {RELEASE: released}
