"""A question of a benchmark: the record that is played, and what the benchmark says about it.

Owns how options and answers of every source become one form: options without their letters, the answer as a letter. Refuses a row that
cannot be asked or scored (`BrokenRow`, with the reason). Invariant: the answer's letter names the option that was right in the row,
shuffled or not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paravt_jax.method.records import Question, QuestionKind

_LETTERED = re.compile(r"\s*(?:\(([A-Z])\)|([A-Z])[.):])\s*(.*)", re.DOTALL)
_OPTION_LINE = re.compile(r"\s*(?:\(([A-Z])\)|([A-Z])[.):])[ \t]*(.*)")


class BrokenRow(ValueError):
    """A row of a table that cannot be asked or scored; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Item:
    """A question, its group by duration and its tasks where the benchmark names them. `subtitles` is a path like `Question.video`."""

    question: Question
    duration: str = ""
    tasks: tuple[str, ...] = ()
    subtitles: str = ""


def text_of(row: Mapping[str, Any], field: str) -> str:
    """A field that has to hold words. Numbers become their text."""
    value = row.get(field)
    text = (
        str(value).strip()
        if isinstance(value, str | int | float) and not isinstance(value, bool)
        else ""
    )
    if not text:
        raise BrokenRow(f"{field} is missing")
    return text


def path_of(text: str) -> str:
    """A path below the root of the videos."""
    path = pathlib.PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise BrokenRow(f"video {text!r} does not lie below the root of the videos")
    return str(path)


def optional(row: Mapping[str, Any], field: str) -> str:
    """A field that may be missing; lists are not read here."""
    value = row.get(field)
    return str(value).strip() if isinstance(value, str | int | float) else ""


def plain_options(options: Any) -> tuple[str, ...]:
    """Options without the letters that some sources write before them: where all have their own, all lose it."""
    options = (
        [str(option).strip() for option in options]
        if isinstance(options, list | tuple) and None not in options
        else []
    )
    if len(options) < 2 or not all(options):
        raise BrokenRow("options are missing")
    found = [_LETTERED.fullmatch(option) for option in options]
    if all(
        match and (match[1] or match[2]) == _letter(i) and match[3].strip()
        for i, match in enumerate(found)
    ):
        return tuple(match[3].strip() for match in found if match)
    return tuple(options)


def split_options(text: str) -> tuple[str, tuple[str, ...]]:
    """A question whose options stand in its text, one a line with letters from A on, cut in two; no options where there are none such."""
    lines = text.strip().split("\n")
    for first in range(len(lines) - 1):
        found = [_OPTION_LINE.fullmatch(line) for line in lines[first + 1 :]]
        letters = [match and (match[1] or match[2]) for match in found]
        if (
            len(found) > 1
            and letters == [_letter(i) for i in range(len(found))]
            and all(match and match[3].strip() for match in found)
        ):
            return "\n".join(lines[: first + 1]).strip(), tuple(
                match[3].strip() for match in found if match
            )
    return text.strip(), ()


def letter_answer(row: Mapping[str, Any], options: Sequence[str], field: str = "answer") -> str:
    """An answer that is an option's letter: "B", "(B)", "B."."""
    found = re.fullmatch(r"\W*([A-Za-z])\W*", text_of(row, field))
    if not found or (options and ord(found[1].upper()) - ord("A") >= len(options)):
        raise BrokenRow(f"{field} {row.get(field)!r} is no letter of an option")
    return found[1].upper()


def word_answer(row: Mapping[str, Any], options: Sequence[str]) -> str:
    """The letter of the option that the answer's words are."""
    wanted = text_of(row, "answer")
    places = [i for i, option in enumerate(options) if option == wanted]
    if len(places) != 1:
        raise BrokenRow(f"answer {wanted!r} is {'no option' if not places else 'several options'}")
    return _letter(places[0])


def index_answer(row: Mapping[str, Any], options: Sequence[str], field: str) -> str:
    """The letter of the option with the row's number."""
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(options):
        raise BrokenRow(f"{field} {value!r} is no number of an option")
    return _letter(value)


def span_answer(row: Mapping[str, Any], field: str) -> str:
    """A span of seconds as the model writes it: "[24.3, 30.4]"."""
    value = row.get(field)
    numbers = (
        [v for v in value if isinstance(v, int | float) and math.isfinite(v)]
        if isinstance(value, list | tuple)
        else []
    )
    if len(numbers) != 2 or len(value or ()) != 2 or not 0 <= numbers[0] < numbers[1]:
        raise BrokenRow(f"{field} {value!r} is no span of seconds")
    return f"[{numbers[0]:g}, {numbers[1]:g}]"


def choice(id: str, video: str, text: str, options: Sequence[str], answer: str) -> Question:
    return Question(id, path_of(video), text, QuestionKind.MULTIPLE_CHOICE, answer, tuple(options))


def shuffled(item: Item, seed: int) -> Item:
    """The same question with its options in an order drawn from (seed, id), and the right answer's new letter.

    What has no options stays as it is.
    """
    question = item.question
    if not question.options:
        return item
    drawn = int.from_bytes(
        hashlib.blake2b(f"{seed}\0{question.id}".encode(), digest_size=8).digest(), "little"
    )
    order = np.random.default_rng(drawn).permutation(len(question.options)).tolist()
    letters = [_letter(i) for i in range(len(order))]
    answer = question.answer  # of your own questions it may be an option's words, which stay right
    if answer in letters:
        answer = letters[order.index(letters.index(answer))]
    return dataclasses.replace(
        item,
        question=dataclasses.replace(
            question, options=tuple(question.options[i] for i in order), answer=answer
        ),
    )


def _letter(index: int) -> str:
    return chr(ord("A") + index)
