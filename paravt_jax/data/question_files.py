"""Your own questions, from a CSV or JSONL file beside a folder of videos.

Columns: `video`, `question` and `answer` are needed; `id`, `options`, `kind` and `subtitles` are
optional. docs/evaluation.md describes them.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from paravt_jax.method.records import Question, QuestionKind
from paravt_jax.method.subtitles import Subtitle, read_srt

COLUMNS = ("id", "video", "question", "options", "answer", "kind", "subtitles")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SHOWN = 10  # bad rows that an error names


class _BadRow(Exception):
    """One row that is no question; says field, value, rule and remedy."""

    def __init__(self, field: str, value: object, rule: str):
        super().__init__(f"{field}: {str(value)[:80]!r}; {rule}")


def read_questions(
    file: str | os.PathLike[str], videos: str | os.PathLike[str]
) -> tuple[Question, ...]:
    """The questions of `file` (.csv or .jsonl), in its order.

    Paths of videos and subtitles are relative to the folder `videos`. Whether a video can be read
    is not looked at. FileNotFoundError where there is no such file, ValueError for a file of
    another kind and for bad rows, which are named with their lines.
    """
    path, root = pathlib.Path(file), pathlib.Path(videos)
    readers = {".csv": _csv_rows, ".jsonl": _jsonl_rows}
    if path.suffix not in readers:
        raise ValueError(f"questions: {path}; its name has to end in .csv or .jsonl: rename it")
    if not path.is_file():
        raise FileNotFoundError(f"questions: {path}; no such file: give a .csv or .jsonl")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"questions: {path}; it is no UTF-8 ({error}): save it as such") from error
    subtitles: dict[str, tuple[Subtitle, ...]] = {}  # path -> its entries, which questions share
    questions: list[Question] = []
    bad: list[str] = []
    lines: dict[str, int] = {}  # id -> its line
    for line, row in readers[path.suffix](text):
        try:
            if isinstance(row, _BadRow):
                raise row
            question = _question(row, line, root, subtitles)
            if question.id in lines:
                raise _BadRow("id", question.id, f"line {lines[question.id]} has it: change one")
        except _BadRow as error:
            bad.append(f"{path}, line {line}: {error}")
            continue
        lines[question.id] = line
        questions.append(question)
    if bad:
        more = [f"and {len(bad) - _SHOWN} more bad rows"] if len(bad) > _SHOWN else []
        raise ValueError("\n".join([*bad[:_SHOWN], *more]))
    if not questions:
        raise ValueError(f"questions: {path}; it has no rows: write one question per row")
    return tuple(questions)


def require_unique_ids(questions: Sequence[Question]) -> None:
    """Raises ValueError naming an id that two questions share: an episode's seed comes from it."""
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
        except csv.Error as error:  # such as a cell that is too long; what follows is unknown
            yield (
                reader.line_num + 1,
                _BadRow("row", "", f"it cannot be read as CSV ({error}): mend it"),
            )
            return
        if None in row or None in row.values():
            rule = f"the header has {len(reader.fieldnames or ())} columns: quote cells with commas"
            yield reader.line_num, _BadRow("row", ",".join(map(str, row.values())), rule)
            continue
        filled: dict[str, Any] = {name: cell for name, cell in row.items() if cell.strip()}
        with contextlib.suppress(ValueError):  # what is no JSON is refused as no list
            filled |= {"options": json.loads(filled["options"])} if "options" in filled else {}
        yield reader.line_num, filled


def _jsonl_rows(text: str) -> Iterator[tuple[int, dict[str, Any] | _BadRow]]:
    for line, written in enumerate(text.split("\n"), 1):
        if not written.strip():
            continue
        try:
            row = json.loads(written)
        except ValueError:
            row = None
        if isinstance(row, dict):
            yield line, {name: value for name, value in row.items() if value is not None}
        else:
            rule = "every line is one JSON object: mend it"
            yield line, _BadRow("row", written.strip(), rule)


def _question(
    row: dict[str, Any],
    line: int,
    root: pathlib.Path,
    subtitles: dict[str, tuple[Subtitle, ...]],
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
    )


def _text(row: dict[str, Any], field: str) -> str:
    value = row.get(field, "")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _BadRow(field, value, "it is a text: write it in quotes")
    if not str(value).strip():
        raise _BadRow(field, value, "it is needed: fill it in")
    return str(value).strip()


def _path(row: dict[str, Any], field: str) -> str:
    path = pathlib.PurePosixPath(text := _text(row, field))
    if path.is_absolute() or ".." in path.parts or not path.parts:
        rule = "a path below the folder of videos: give one relative to it, without '..'"
        raise _BadRow(field, text, rule)
    return str(path)


def _options(row: dict[str, Any]) -> tuple[str, ...]:
    if "options" not in row:
        return ()
    options = row["options"]
    texts = isinstance(options, list) and all(isinstance(o, str) and o.strip() for o in options)
    if not texts or not 2 <= len(options) <= len(_LETTERS):
        rule = (
            f'a JSON list of 2 to {len(_LETTERS)} texts without letters: write ["a car", "a boat"]'
        )
        raise _BadRow("options", options, rule)
    return tuple(option.strip() for option in options)


def _kind(row: dict[str, Any], options: tuple[str, ...]) -> QuestionKind:
    if "kind" not in row:
        return QuestionKind.MULTIPLE_CHOICE if options else QuestionKind.OPEN_ENDED
    kinds = tuple(kind.value for kind in QuestionKind)
    if row["kind"] not in kinds:
        raise _BadRow(
            "kind", row["kind"], f"one of {', '.join(kinds)}: choose one, or leave it out"
        )
    kind = QuestionKind(row["kind"])
    if (kind is QuestionKind.MULTIPLE_CHOICE) != bool(options):
        rule = "mcq has options and the others have none: change the kind or the options"
        raise _BadRow("kind", row["kind"], rule)
    return kind


def _answer(row: dict[str, Any], kind: QuestionKind, options: tuple[str, ...]) -> str:
    if kind is QuestionKind.TEMPORAL_GROUNDING:
        return _span(row.get("answer", ""))
    answer = _text(row, "answer")
    if kind is QuestionKind.MULTIPLE_CHOICE and answer not in tuple(_LETTERS[: len(options)]):
        rule = f"the letter of the right option: give one from A to {_LETTERS[len(options) - 1]}"
        raise _BadRow("answer", answer, rule)
    return answer


def _span(value: Any) -> str:
    try:
        span = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        span = None
    numbers = span if isinstance(span, list) else []
    good = [n for n in numbers if isinstance(n, int | float) and not isinstance(n, bool)]
    if len(numbers) != 2 or len(good) != 2 or not 0 <= good[0] < good[1] < math.inf:
        rule = "a span of seconds, start before end: write [12.5, 20]"
        raise _BadRow("answer", value, rule)
    return f"[{good[0]:g}, {good[1]:g}]"


def _subtitles(
    row: dict[str, Any], root: pathlib.Path, known: dict[str, tuple[Subtitle, ...]]
) -> tuple[Subtitle, ...]:
    """The entries of a row's file, read into `known` where they are not there yet."""
    path = _path(row, "subtitles")
    if path in known:
        return known[path]
    if not path.endswith(".srt"):
        raise _BadRow("subtitles", path, "a SubRip file (.srt): convert it, or leave it out")
    try:
        entries = read_srt((root / path).read_bytes())
    except OSError:
        rule = f"no such file below {root}: put it there, or leave it out"
        raise _BadRow("subtitles", path, rule) from None
    if not entries:
        raise _BadRow("subtitles", path, "it has no entries: mend it, or leave it out")
    known[path] = tuple(entries)
    return known[path]
