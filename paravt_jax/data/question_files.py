"""Reads your own questions from a CSV or JSONL file.

The columns `video`, `question` and `answer` are required; `id`, `options`, `kind`, `subtitles` and
`evidence` are optional. docs/evaluation.md describes them.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from paravt_jax.data import foreign
from paravt_jax.data.foreign import ForeignFileError
from paravt_jax.data.frames import VideoError, join
from paravt_jax.data.srt import read_srt
from paravt_jax.method.records import Question, QuestionKind
from paravt_jax.method.subtitles import Subtitle

COLUMNS = ("id", "video", "question", "options", "answer", "kind", "subtitles", "evidence")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MOST_BYTES = 1 << 30
# Upper bound on the bad rows that an error lists.
_MAX_NAMED_ROWS = 10
# More than 30 years. An int of JSON may be too large for a float.
_MOST_SECONDS = 1e9

# Subtitles by path. Questions about the same video share one tuple.
_SubtitleCache = dict[str, tuple[Subtitle, ...]]


class _BadRow(Exception):
    """A row that is not a question. The message gives field, value, rule and remedy."""

    def __init__(self, field: str, value: object, rule: str):
        super().__init__(f"{field}: {str(value)[:80]!r}; {rule}")


def read_questions(
    file: str | os.PathLike[str], videos: str | os.PathLike[str]
) -> tuple[Question, ...]:
    """Read all questions of a file, in the order of the file. Videos are not opened.

    Args:
        file: A .csv or .jsonl file.
        videos: Folder of the videos. Paths of videos and subtitles are relative to it.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file has another ending, or has bad rows. The message names the first ten
            with their line numbers.
    """
    path = pathlib.Path(file)
    read_rows = {".csv": _csv_rows, ".jsonl": _jsonl_rows}.get(path.suffix)
    if read_rows is None:
        raise ValueError(f"questions: {path}; its name has to end in .csv or .jsonl: rename it")
    if not path.is_file():
        raise FileNotFoundError(f"questions: {path}; no such file: give a .csv or .jsonl")
    try:
        text = foreign.read_text(path, _MOST_BYTES)
    except ForeignFileError as error:
        raise ValueError(f"questions: {error}") from error

    subtitles: _SubtitleCache = {}
    questions: list[Question] = []
    errors: list[str] = []
    line_of_id: dict[str, int] = {}
    for line, row in read_rows(text):
        try:
            if isinstance(row, _BadRow):
                raise row
            question = _question(row, line, pathlib.Path(videos), subtitles)
            if question.id in line_of_id:
                rule = f"line {line_of_id[question.id]} has the same id: change one"
                raise _BadRow("id", question.id, rule)
        except _BadRow as error:
            errors.append(f"{path}, line {line}: {error}")
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
    reader = csv.DictReader(io.StringIO(text, newline=""))
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # For example, a cell is too long. The start of the next row is then unknown, so stop.
            rule = f"it cannot be read as CSV ({error}): correct it"
            yield reader.line_num + 1, _BadRow("row", "", rule)
            return
        # DictReader puts cells without a column under None, and None into columns without a cell.
        if None in row or None in row.values():
            rule = f"the header has {len(reader.fieldnames or ())} columns: quote cells with commas"
            yield reader.line_num, _BadRow("row", ",".join(map(str, row.values())), rule)
            continue
        filled: dict[str, Any] = {name: cell for name, cell in row.items() if cell.strip()}
        if "options" in filled:
            # A cell that is not JSON stays text, and `_options` refuses it: it is not a list.
            with contextlib.suppress(ValueError, RecursionError):
                filled["options"] = json.loads(filled["options"])
        yield reader.line_num, filled


def _jsonl_rows(text: str) -> Iterator[tuple[int, dict[str, Any] | _BadRow]]:
    # splitlines() would also split at characters that JSON allows inside a text (U+2028).
    for line, written in enumerate(text.split("\n"), 1):
        if not written.strip():
            continue
        try:
            row = json.loads(written)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            yield line, {name: value for name, value in row.items() if value is not None}
        else:
            rule = "every line is one JSON object: correct it"
            yield line, _BadRow("row", written.strip(), rule)


def _question(
    row: dict[str, Any], line: int, root: pathlib.Path, subtitles: _SubtitleCache
) -> Question:
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
        subtitles=_subtitles(row, root, subtitles) if "subtitles" in row else (),
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
        rule = f"a JSON list of 2 to {len(_LETTERS)} texts without letters"
        raise _BadRow("options", options, f'{rule}: write ["a car", "a boat"]')
    return tuple(option.strip() for option in options)


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
    if kind is QuestionKind.MULTIPLE_CHOICE and answer not in tuple(_LETTERS[: len(options)]):
        rule = f"the letter of the right option: give one from A to {_LETTERS[len(options) - 1]}"
        raise _BadRow("answer", answer, rule)
    return answer


def _span(value: Any, field: str) -> tuple[float, float]:
    """Read [start, end] in seconds from a list, or from the text of a list."""
    span: Any = value
    if isinstance(value, str):
        try:
            span = json.loads(value)
        except (ValueError, RecursionError):
            span = None
    if not _is_span(span):
        rule = "a span of seconds, start before end: write [12.5, 20]"
        raise _BadRow(field, value, rule)
    start, end = span
    return float(start), float(end)


def _is_span(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    # A bool is an int in Python.
    if any(isinstance(n, bool) or not isinstance(n, int | float) for n in value):
        return False
    start, end = value
    return 0 <= start < end < _MOST_SECONDS


def _subtitles(
    row: dict[str, Any], root: pathlib.Path, cache: _SubtitleCache
) -> tuple[Subtitle, ...]:
    """Read the subtitle file of a row, unless it is in the cache."""
    path = _path(row, "subtitles")
    if path in cache:
        return cache[path]
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
    cache[path] = tuple(entries)
    return cache[path]
