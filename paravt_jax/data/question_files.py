"""Reads your own questions from a file: CSV (also with semicolons or tabs), JSONL or a JSON list.

The columns `video`, `question` and `answer` are required; `id`, `options`, `kind`, `subtitles` and
`evidence` are optional, and so are columns of your own. docs/evaluation.md describes them.
"""

from __future__ import annotations

import collections
import csv
import difflib
import functools
import io
import json
import os
import pathlib
import re
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import pydantic

from paravt_jax.data.foreign import ForeignFileError, read_srt, read_text
from paravt_jax.data.frames import VideoError, join
from paravt_jax.method.records import Question, QuestionKind, Subtitle

_MOST_BYTES = 1 << 30
# An option behind its letter: "(A) one", "A. one", "A) one", "a: one".
_OPTION = re.compile(r"\s*(?:\(([A-Za-z])\)|([A-Za-z])[.):])\s*(.*)", re.DOTALL)
_BARE_LETTER = re.compile(r"\(?[A-Z][.)]?")
_SPAN_RULE = "give a span of seconds, start before end: [12.5, 20]"
# Names that are less alike than this are no misspellings.
_ALIKE = 0.75

_ReadSubtitles = Callable[[str], tuple[Subtitle, ...]]


def _bad(field: str, value: object, rule: str) -> ValueError:
    return ValueError(f"{field}: {str(value)[:80]!r}; {rule}")


def _parsed(value: Any) -> Any:
    """Return what a text of JSON holds; any other value as it is. A table has only texts."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass
    return value


def below(path: str) -> str:
    """Return a path in its shortest form. Raises ValueError if it leaves the folder of videos."""
    name = pathlib.PurePosixPath(path)
    if name.is_absolute() or ".." in name.parts or not name.parts or "\\" in path:
        raise ValueError("give a path below the folder of videos, with / and without '..'")
    # All questions about a video have one name of it.
    return str(name)


def _rising(span: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= span[0] < span[1]:
        raise ValueError(_SPAN_RULE)
    return span


def _distinct(options: tuple[str, ...]) -> tuple[str, ...]:
    # The prompt writes letters of its own.
    options = tuple(without_letters(options))
    # Punctuation may be all that differs, as in C and C++.
    if len({" ".join(option.casefold().split()) for option in options}) < len(options):
        raise ValueError("one option occurs twice: change it, or leave it out")
    return options


_Text = Annotated[str, pydantic.StringConstraints(strip_whitespace=True, min_length=1)]
_Path = Annotated[_Text, pydantic.AfterValidator(below)]
_Seconds = Annotated[float, pydantic.Field(strict=True, allow_inf_nan=False)]
Span = Annotated[
    tuple[_Seconds, _Seconds], pydantic.BeforeValidator(_parsed), pydantic.AfterValidator(_rising)
]
_Options = Annotated[
    tuple[_Text, ...],
    pydantic.Field(
        min_length=2,
        max_length=len(string.ascii_uppercase),
        description='give a JSON list of 2 to 26 texts: ["a car", "a boat"]',
    ),
    pydantic.BeforeValidator(_parsed),
    pydantic.AfterValidator(_distinct),
]
_SPAN = pydantic.TypeAdapter(Span)


class _Columns(pydantic.BaseModel):
    """The columns of a line. Those that others are checked against come first."""

    model_config = pydantic.ConfigDict(coerce_numbers_to_str=True)

    video: _Path
    question: _Text
    id: _Text | None = None
    options: _Options = ()
    kind: QuestionKind | None = pydantic.Field(None, validate_default=True)
    subtitles: _Path | None = None
    evidence: Span | None = pydantic.Field(None, description=_SPAN_RULE)
    answer: Any = pydantic.Field(description=_SPAN_RULE)

    @pydantic.field_validator("kind")
    @classmethod
    def _fits_options(cls, kind: QuestionKind | None, info: Any) -> QuestionKind | None:
        has_options = bool(info.data.get("options"))
        if kind is not None and (kind is QuestionKind.MULTIPLE_CHOICE) != has_options:
            raise ValueError("mcq has options and other kinds have none: change one of them")
        return QuestionKind.MULTIPLE_CHOICE if has_options else kind

    @pydantic.field_validator("answer")
    @classmethod
    def _as_text(cls, answer: Any, info: Any) -> str:
        kind = info.data.get("kind")
        if kind is QuestionKind.TEMPORAL_GROUNDING:
            start, end = _SPAN.validate_python(answer)
            return f"[{start:g}, {end:g}]"
        # A bool is an int in Python.
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise ValueError("it is a text: write it in quotes")
        text = str(answer).strip()
        letters = string.ascii_uppercase[: len(info.data.get("options") or ())]
        text = text.upper() if letters else text
        if letters and text not in tuple(letters):
            raise ValueError(f"the letter of the right option: give one from A to {letters[-1]}")
        if kind is None and _BARE_LETTER.fullmatch(text):
            raise ValueError("a letter, but there are no options: add them, or the kind oe")
        return text


def read_questions(
    file: str | os.PathLike[str], videos: str | os.PathLike[str]
) -> tuple[Question, ...]:
    """Read all questions of a file, in the order of the file. Videos are not opened.

    See `read_columns`.
    """
    return tuple(question for question, _ in read_columns(file, videos))


def read_columns(
    file: str | os.PathLike[str], videos: str | os.PathLike[str]
) -> list[tuple[Question, dict[str, str]]]:
    """Read all questions of a file with its other columns, in the order of the file.

    Args:
        file: A .csv, .jsonl or .json file.
        videos: Folder of the videos. Paths of videos and subtitles are relative to it.

    Returns:
        Each question, and the values of its other columns by their names, without empty ones.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file has another ending, or a bad line, whose number the message names.
    """
    path = pathlib.Path(file)
    read_lines = _READERS.get(path.suffix)
    if read_lines is None:
        raise ValueError(f"questions: {path}; save it as a file of {', '.join(_READERS)}")
    if not path.is_file():
        raise FileNotFoundError(f"questions: {path}; no such file: give a .csv, .jsonl or .json")
    text = read_text(path, _MOST_BYTES)
    # Questions about the same video share one tuple.
    read_subtitles = functools.cache(functools.partial(_subtitles, pathlib.Path(videos)))
    questions: dict[str, tuple[Question, dict[str, str]]] = {}
    place = "line 0"
    try:
        for place, columns in read_lines(text):
            question, others = _question(columns, place, read_subtitles)
            if question.id in questions:
                raise _bad("id", question.id, "another question has the same id: change one")
            questions[question.id] = question, others
    except ValueError as error:
        raise ValueError(f"{path}, {place}: {error}") from error
    except csv.Error as error:
        # For example, a cell is too long.
        raise ValueError(f"{path}, after {place}: not CSV ({error}); correct it") from error
    if not questions:
        raise ValueError(f"questions: {path}; it has no questions: write one per line")
    return [*questions.values()]


def require_unique_ids(questions: Sequence[Question]) -> None:
    """Raise ValueError if two questions have the same id.

    An episode's seed comes from the id, so both questions would draw the same numbers.
    """
    counts = collections.Counter(question.id for question in questions)
    for id, count in counts.most_common(1):
        if count > 1:
            raise ValueError(f"questions: {count} have the id {id!r}; give each its own")


def _csv_lines(text: str) -> Iterator[tuple[str, Any]]:
    header = text.partition("\n")[0]
    # Where a comma is the decimal mark, spreadsheets write semicolons. No column has any of them.
    delimiter = max(",;\t", key=header.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    columns = reader.fieldnames or ()
    if len(set(columns)) < len(columns):
        yield "line 1", header
    for cells in reader:
        place = f"line {reader.line_num}"
        # DictReader puts cells without a column under None, and None into columns without a cell.
        if None in cells or None in cells.values():
            yield place, delimiter.join(map(str, cells.values()))
        # Spreadsheets write rows without any cell at the end.
        if any(map(str.strip, cells.values())):
            yield place, {name.strip(): cell for name, cell in cells.items()}


def _json_lines(text: str) -> Iterator[tuple[str, Any]]:
    records = _parsed(text)
    if isinstance(records, list):
        yield from ((f"question {number}", record) for number, record in enumerate(records, 1))
        return
    # splitlines() would also split at characters that JSON allows inside a text (U+2028).
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {number}", _parsed(line)


_READERS = {".csv": _csv_lines, ".tsv": _csv_lines, ".jsonl": _json_lines, ".json": _json_lines}


def _question(
    columns: Any, place: str, read_subtitles: _ReadSubtitles
) -> tuple[Question, dict[str, str]]:
    if not isinstance(columns, dict):
        rule = "it is no JSON object, or its cells are not those of the header: correct it"
        raise _bad("line", columns, rule)
    columns = {k: v for k, v in columns.items() if v is not None and str(v).strip()}
    known = _Columns.model_fields
    own = {name: str(value) for name, value in columns.items() if name not in known}
    for name, value in own.items():
        for meant in difflib.get_close_matches(name.lower(), known, 1, _ALIKE):
            if abs(len(name) - len(meant)) < 2:
                raise _bad(name, value, f"rename the column to {meant}, or to another word")
    try:
        read = _Columns.model_validate(columns)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        rule = known[field].description or f"{first['msg']}: correct it"
        if field not in columns:
            rule = "it is required: fill it in"
        elif first["type"] == "value_error":
            rule = first["msg"].removeprefix("Value error, ")
        raise _bad(field, columns.get(field, ""), rule) from None
    question = Question(
        id=read.id or place.split()[1],
        video=read.video,
        text=read.question,
        kind=read.kind or QuestionKind.OPEN_ENDED,
        answer=read.answer,
        options=read.options,
        subtitles=read_subtitles(read.subtitles) if read.subtitles else (),
        evidence=read.evidence,
    )
    return question, own


def _subtitles(root: pathlib.Path, path: str) -> tuple[Subtitle, ...]:
    """Read a subtitle file below a folder."""
    try:
        return tuple(read_srt(join(root, path)))
    except (OSError, VideoError, ForeignFileError) as error:
        raise _bad("subtitles", path, f"{error}; give a SubRip file (.srt)") from error


def without_letters(options: Sequence[str]) -> list[str]:
    """Remove the letters before options if they are A, B, C, ... in order.

    In ("A. Lincoln", "B. Obama", "A. Smith") they belong to the names and stay.
    """
    matches = [match for match in map(_OPTION.fullmatch, options) if match and match[3].strip()]
    letters = "".join(match[1] or match[2] for match in matches)
    if len(matches) < len(options) or not any(
        alphabet.startswith(letters)
        for alphabet in (string.ascii_uppercase, string.ascii_lowercase)
    ):
        return list(options)
    return [match[3].strip() for match in matches]
