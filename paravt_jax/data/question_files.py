"""Reads your own questions from a file: CSV (also with semicolons), a JSON array or JSONL.

The columns `video`, `question` and `answer` are required; `id`, `options`, `kind`, `subtitles` and
`evidence` are optional. docs/evaluation.md describes them.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paravt_jax.data.foreign import ForeignFileError
from paravt_jax.data.frames import VideoError, join
from paravt_jax.data.lettered import without_letters
from paravt_jax.data.text_files import read_srt, read_text
from paravt_jax.method.records import Question, QuestionKind, Subtitle

COLUMNS = ("id", "video", "question", "options", "answer", "kind", "subtitles", "evidence")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MOST_BYTES = 1 << 30
_BARE_LETTER = re.compile(r"\(?[A-Z][.)]?")
# Upper bound on the bad rows that an error lists.
_MAX_NAMED_ROWS = 10
# More than 30 years. An int of JSON may be too large for a float.
_MOST_SECONDS = 1e9

_ReadSubtitles = Callable[[str], tuple[Subtitle, ...]]


class _BadRow(Exception):
    """A row that is not a question. The message gives field, value, rule and remedy."""

    def __init__(self, field: str, value: object, rule: str):
        super().__init__(f"{field}: {str(value)[:80]!r}; {rule}")


def read_questions(
    file: str | os.PathLike[str], videos: str | os.PathLike[str]
) -> tuple[Question, ...]:
    """Read all questions of a file, in the order of the file. Videos are not opened.

    Args:
        file: A .csv, .json or .jsonl file.
        videos: Folder of the videos. Paths of videos and subtitles are relative to it.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file has another ending, or has bad rows. The message names the first ten
            with their line numbers.
    """
    path = pathlib.Path(file)
    read_rows = _READERS.get(path.suffix)
    if read_rows is None:
        endings = ", ".join(_READERS)
        raise ValueError(f"questions: {path}; its name ends in none of {endings}: save it as one")
    if not path.is_file():
        raise FileNotFoundError(f"questions: {path}; no such file: give a .csv or .jsonl")
    try:
        text = read_text(path, _MOST_BYTES)
    except ForeignFileError as error:
        raise ValueError(f"questions: {error}") from error

    # Questions about the same video share one tuple.
    read_subtitles = functools.cache(functools.partial(_subtitles, pathlib.Path(videos)))
    questions: list[Question] = []
    errors: list[str] = []
    line_of_id: dict[str, int] = {}
    unit = "row" if _is_array(text) else "line"
    for line, row in read_rows(text):
        try:
            if isinstance(row, _BadRow):
                raise row
            question = _question(row, line, read_subtitles)
            if question.id in line_of_id:
                rule = f"{unit} {line_of_id[question.id]} has the same id: change one"
                raise _BadRow("id", question.id, rule)
        except _BadRow as error:
            errors.append(f"{path}, {unit} {line}: {error}")
            continue
        line_of_id[question.id] = line
        questions.append(question)
    if len(errors) > _MAX_NAMED_ROWS:
        errors[_MAX_NAMED_ROWS:] = [f"and {len(errors) - _MAX_NAMED_ROWS} more bad rows"]
    if errors:
        raise ValueError("\n".join(errors))
    if not questions:
        raise ValueError(f"questions: {path}; it has no rows: write one question per row")
    return tuple(questions)


def require_unique_ids(questions: Sequence[Question]) -> None:
    """Raise ValueError if two questions have the same id.

    An episode's seed comes from the id, so both questions would draw the same numbers.
    """
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise ValueError(
                f"questions: two have the id {question.id!r}; an id names one question: change one"
            )
        seen.add(question.id)


def _csv_rows(text: str) -> Iterator[tuple[int, dict[str, Any] | _BadRow]]:
    header = text.partition("\n")[0]
    # Where a comma is the decimal mark, spreadsheets write semicolons. No column has either.
    delimiter = max(",;", key=header.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    columns = reader.fieldnames or ()
    if len(set(columns)) < len(columns):
        yield 1, _BadRow("row", header.strip(), "a column occurs twice: leave one out")
        return
    try:
        for row in reader:
            yield reader.line_num, _csv_row(row, delimiter)
    except csv.Error as error:
        # For example, a cell is too long. The start of the next row is then unknown.
        rule = f"it cannot be read as CSV ({error}): correct it"
        yield reader.line_num + 1, _BadRow("row", "", rule)


def _csv_row(row: dict[str, Any], delimiter: str) -> dict[str, Any] | _BadRow:
    # DictReader puts cells without a column under None, and None into columns without a cell.
    if None in row or None in row.values():
        rule = f"its cells are not those of the header: quote cells with {delimiter!r}, add others"
        return _BadRow("row", delimiter.join(map(str, row.values())), rule)
    filled: dict[str, Any] = {name: cell for name, cell in row.items() if cell.strip()}
    if "options" in filled:
        # A cell that is not JSON stays text, and `_options` refuses it: it is not a list.
        filled["options"] = _json(filled["options"])
    return filled


def _json_rows(text: str) -> Iterator[tuple[int, dict[str, Any] | _BadRow]]:
    """The rows of an array, numbered from 1, or of JSON lines, numbered by line."""
    if _is_array(text):
        array = _json(text)
        rows = enumerate(array if isinstance(array, list) else [array], 1)
    else:
        # splitlines() would also split at characters that JSON allows inside a text (U+2028).
        lines = enumerate(text.split("\n"), 1)
        rows = ((number, _json(line)) for number, line in lines if line.strip())
    rule = "the file is an array of JSON objects, or has one on each line: correct it"
    for number, row in rows:
        if isinstance(row, dict):
            yield number, {name: value for name, value in row.items() if value is not None}
        else:
            yield number, _BadRow("row", row, rule)


def _is_array(text: str) -> bool:
    return text.lstrip().startswith("[")


def _json(text: str) -> Any:
    """A value of JSON, or the text if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()


_READERS = {".csv": _csv_rows, ".json": _json_rows, ".jsonl": _json_rows}


def _question(row: dict[str, Any], line: int, read_subtitles: _ReadSubtitles) -> Question:
    for name in row:
        if name not in COLUMNS:
            rule = f"the columns are {', '.join(COLUMNS)}: rename it, or leave it out"
            raise _BadRow("column", name, rule)
    options = _options(row)
    kind = _kind(row, options)
    return Question(
        id=_text(row, "id") if "id" in row else str(line),
        video=_path(row, "video"),
        text=_text(row, "question"),
        kind=kind,
        answer=_answer(row, kind, options),
        options=options,
        subtitles=read_subtitles(_path(row, "subtitles")) if "subtitles" in row else (),
        evidence=_span(row["evidence"], "evidence") if "evidence" in row else None,
    )


def _text(row: dict[str, Any], field: str) -> str:
    value = row.get(field, "")
    # A bool is an int in Python.
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _BadRow(field, value, "it is a text: write it in quotes")
    if not str(value).strip():
        raise _BadRow(field, value, "it is required: fill it in")
    return str(value).strip()


def _path(row: dict[str, Any], field: str) -> str:
    text = _text(row, field)
    path = pathlib.PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        rule = "a path below the folder of videos: give one relative to it, without '..'"
        raise _BadRow(field, text, rule)
    return str(path)


def _options(row: dict[str, Any]) -> tuple[str, ...]:
    if "options" not in row:
        return ()
    options = row["options"]
    are_texts = isinstance(options, list) and all(
        isinstance(option, str) and option.strip() for option in options
    )
    if not are_texts or not 2 <= len(options) <= len(_LETTERS):
        rule = f"a JSON list of 2 to {len(_LETTERS)} texts"
        raise _BadRow("options", options, f'{rule}: write ["a car", "a boat"]')
    # The prompt writes letters of its own.
    options = without_letters([option.strip() for option in options])
    # Punctuation may be all that differs, as in C and C++.
    if len({" ".join(option.casefold().split()) for option in options}) < len(options):
        raise _BadRow("options", options, "one occurs twice: change it, or leave it out")
    return tuple(options)


def _kind(row: dict[str, Any], options: tuple[str, ...]) -> QuestionKind:
    if "kind" not in row:
        return QuestionKind.MULTIPLE_CHOICE if options else QuestionKind.OPEN_ENDED
    kinds = tuple(kind.value for kind in QuestionKind)
    if row["kind"] not in kinds:
        rule = f"one of {', '.join(kinds)}: choose one, or leave it out"
        raise _BadRow("kind", row["kind"], rule)
    kind = QuestionKind(row["kind"])
    if (kind is QuestionKind.MULTIPLE_CHOICE) != bool(options):
        rule = "mcq has options and the others have none: change the kind or the options"
        raise _BadRow("kind", row["kind"], rule)
    return kind


def _answer(row: dict[str, Any], kind: QuestionKind, options: tuple[str, ...]) -> str:
    if kind is QuestionKind.TEMPORAL_GROUNDING:
        start, end = _span(row.get("answer", ""), "answer")
        return f"[{start:g}, {end:g}]"
    answer = _text(row, "answer")
    if "kind" not in row and not options and _BARE_LETTER.fullmatch(answer):
        rule = "a letter, but the row has no options: add them, or the kind oe if it has none"
        raise _BadRow("answer", answer, rule)
    if kind is QuestionKind.MULTIPLE_CHOICE and answer not in tuple(_LETTERS[: len(options)]):
        rule = f"the letter of the right option: give one from A to {_LETTERS[len(options) - 1]}"
        raise _BadRow("answer", answer, rule)
    return answer


def _span(value: Any, field: str) -> tuple[float, float]:
    """Read [start, end] in seconds from a list, or from the text of a list."""
    span = _json(value) if isinstance(value, str) else value
    # A bool is an int in Python.
    numbers = isinstance(span, list) and all(type(time) in (int, float) for time in span)
    if not numbers or len(span) != 2 or not 0 <= span[0] < span[1] < _MOST_SECONDS:
        raise _BadRow(field, value, "a span of seconds, start before end: write [12.5, 20]")
    return float(span[0]), float(span[1])


def _subtitles(root: pathlib.Path, path: str) -> tuple[Subtitle, ...]:
    """Read a subtitle file below a folder."""
    if not path.endswith(".srt"):
        raise _BadRow("subtitles", path, "a SubRip file (.srt): convert it, or leave it out")
    try:
        entries = read_srt(join(root, path))
    except (OSError, VideoError):
        rule = f"no such file below {root}: put it there, or leave it out"
        raise _BadRow("subtitles", path, rule) from None
    except ForeignFileError as error:
        raise _BadRow("subtitles", path, str(error)) from None
    if not entries:
        raise _BadRow("subtitles", path, "it has no entries: correct it, or leave it out")
    return tuple(entries)
