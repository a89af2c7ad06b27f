"""`Item`, a benchmark's question, and the readers of fields that the benchmarks share.

Publishers write options and answers in different ways. The readers convert them to one form:
options have no letters, and the answer to a multiple-choice question is a letter. They raise
`BrokenRow` with the reason if a row cannot be asked or scored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from paravt_jax.data.lettered import without_letters
from paravt_jax.method.records import Question, QuestionKind


class BrokenRow(ValueError):
    """A row of a table that cannot be asked or scored; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Item:
    """A question with its benchmark's metadata."""

    question: Question
    duration: str = ""
    """Name of the duration group, if the benchmark has such groups."""
    tasks: tuple[str, ...] = ()
    """Tasks that the question belongs to, if the benchmark names any."""
    subtitles: str = ""
    """Path of an .srt file, relative like `Question.video`; "" for none."""


# --- fields ---


def text_of(row: Mapping[str, Any], field: str) -> str:
    """Read a field that must not be empty. Numbers become text."""
    text = optional(row, field)
    if not text or isinstance(row.get(field), bool):
        raise BrokenRow(f"{field} is missing")
    return text


def optional(row: Mapping[str, Any], field: str) -> str:
    """Read a field that may be missing. Lists count as missing."""
    value = row.get(field)
    return str(value).strip() if isinstance(value, str | int | float) else ""


def optional_task(row: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Read a field with a question's task, as a tuple of one task or none."""
    task = optional(row, field)
    return (task,) if task else ()


def path_of(text: str) -> str:
    """Check that a path stays below the root of the videos."""
    path = pathlib.PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise BrokenRow(f"video {text!r}: not a path below the root of the videos")
    return str(path)


# --- options ---


def plain_options(options: Any) -> tuple[str, ...]:
    """Read a list of options and remove the letters before them.

    Letters are removed as by `without_letters`.
    """
    if not isinstance(options, list | tuple) or None in options:
        raise BrokenRow("options are missing")
    texts = [str(option).strip() for option in options]
    if len(texts) < 2 or not all(texts):
        raise BrokenRow("options are missing")
    return tuple(without_letters(texts))


def without_unused(options: Sequence[Any]) -> list[Any]:
    """Drop the unused options at the end of a list of fixed length: None, "" and "N/A".

    Raises:
        BrokenRow: an option follows an unused one, so letters and indices would name other options.
    """
    used = [option not in (None, "", "N/A") for option in options]
    count = sum(used)
    if not all(used[:count]):
        raise BrokenRow("an option is missing before the last one")
    return list(options[:count])


# --- answers ---


def letter_answer(row: Mapping[str, Any], options: Sequence[str], field: str = "answer") -> str:
    """Read an answer that is an option's letter: "B", "(B)", "b."."""
    found = re.fullmatch(r"\W*([A-Za-z])\W*", text_of(row, field))
    letter = found[1].upper() if found else ""
    if not letter or (options and ord(letter) - ord("A") >= len(options)):
        raise BrokenRow(f"{field} {row.get(field)!r}: not the letter of an option")
    return letter


def word_answer(row: Mapping[str, Any], options: Sequence[str]) -> str:
    """Read an answer that repeats the text of an option, and return the option's letter."""
    answer = text_of(row, "answer")
    matches = [index for index, option in enumerate(options) if option == answer]
    if len(matches) != 1:
        problem = "equal to several options" if matches else "not an option"
        raise BrokenRow(f"answer {answer!r}: {problem}")
    return _letter(matches[0])


def index_answer(row: Mapping[str, Any], options: Sequence[str], field: str) -> str:
    """Read an answer that is an option's index, from 0, and return the option's letter."""
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(options):
        raise BrokenRow(f"{field} {value!r}: not the index of an option")
    return _letter(value)


def span_answer(row: Mapping[str, Any], field: str) -> str:
    """Read a span [start, end] in seconds and write it as a model does: "[24.3, 30.4]"."""
    value = row.get(field)
    if _is_span(value):
        return f"[{value[0]:g}, {value[1]:g}]"
    raise BrokenRow(f"{field} {value!r}: not a span of seconds")


def _is_span(value: Any) -> TypeGuard[Sequence[float]]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    if not all(isinstance(time, int | float) and math.isfinite(time) for time in value):
        return False
    return 0 <= value[0] < value[1]


# --- questions ---


def choice(id: str, video: str, text: str, options: Sequence[str], answer: str) -> Question:
    """Make a multiple-choice question; `answer` is a letter."""
    return Question(id, path_of(video), text, QuestionKind.MULTIPLE_CHOICE, answer, tuple(options))


def questions_hash(items: Iterable[Item]) -> str:
    """Hash questions with their options, answers, subtitles and the names of their videos."""
    total = hashlib.blake2b(digest_size=16)
    for item in items:
        q = item.question
        fields = [q.id, q.video, q.text, str(q.kind), q.answer, q.options, item.subtitles]
        if q.subtitles:
            fields.append([dataclasses.astuple(entry) for entry in q.subtitles])
        total.update(json.dumps(fields).encode())
    return total.hexdigest()


def _letter(index: int) -> str:
    return chr(ord("A") + index)
