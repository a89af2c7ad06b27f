"""Turns the rows of a source into one prepared set, with several processes.

    a folder of published tables, or your own questions
    -> `Rows` -> `read_row` in worker processes -> outcomes -> records

Each row is read on its own, under a deadline: its videos are opened, and their first and last frame
decoded. A bad row does not affect the others. Every row is either stored or listed once in
`left_out.jsonl` with a reason, in the order of the source.

The outcome of each row is appended to a file, so an interrupted preparation goes on with the next:

    FOLDER/work-<digest>.jsonl    outcomes of the rows so far; deleted at the end
    FOLDER/records/               the stored splits, with their checksums
    FOLDER/summary.json, left_out.jsonl
    FOLDER/plan.json              the settings of the set; written last
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import pydantic
from typing_extensions import TypedDict

from paravt_jax.data import datasets
from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.file_sums import SUMS, require_sealed
from paravt_jax.data.published import open_table, read_rows
from paravt_jax.data.row_reading import Reading, ReadRow, RowTask, unread_row
from paravt_jax.data.stored_json import read_checked_json, read_json, write_checked_json
from paravt_jax.data.stored_settings import require_same
from paravt_jax.data.workers import Workers
from paravt_jax.method.conversations import Conversation
from paravt_jax.method.records import Question
from paravt_jax.progress import Progress

SUMMARY = "summary.json"
LEFT_OUT = "left_out.jsonl"
# Written last: if it exists, the set is complete.
PLAN = "plan.json"
WORK = "work-*.jsonl"
OWN = "questions"
"""Source of your own questions."""

# Rows that are submitted to the workers in advance, so that a slow one does not delay the others.
_AHEAD = 128
_REMEDY = "restore it, or delete the folder and prepare the set again"
_RECORDS = "records"
# Part of every plan. Change it whenever the same files give other records.
_FORMAT = 4
_Record = TypeVar("_Record", Question, Conversation)
_OUTCOME = pydantic.TypeAdapter(ReadRow)


class Summary(TypedDict):
    """The content of summary.json."""

    sources: dict[str, dict[str, int]]
    """Rows of each source, by the reason why they are left out, or as `kept`."""
    kinds: dict[str, int]
    """Kept rows by kind of question, and conversations."""
    sizes: dict[str, int]
    """Videos and pictures by width x height in pixels, the most frequent first."""
    longest: float
    """Duration of the longest video, in seconds."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a source.

    Attributes:
        files: What identifies them.
        count: Their number.
        tasks: The rows, in order.
    """

    files: dict[str, Any]
    count: int
    tasks: Iterator[RowTask]


def rows_of_tables(folder: pathlib.Path) -> Rows:
    """Open the parquet files below a folder, in the order of their names.

    Raises:
        FileNotFoundError: There are none.
        ValueError: Two files have the same name, or a file is not in the published format.
    """
    files = sorted(folder.rglob("*.parquet"), key=lambda path: path.name)
    if not files:
        raise FileNotFoundError(
            f"{folder}: no parquet files; give the folder of ParaVT/ParaVT-Parquet"
        )
    for file, next_file in itertools.pairwise(files):
        if file.name == next_file.name:
            raise ValueError(
                f"{folder}: {file.name} occurs twice, but rows are named after their file; keep one"
            )
    tables = [open_table(path) for path in files]
    tasks = (
        RowTask(f"{table.path.stem}:{number}", table.split, columns)
        for table in tables
        for number, columns in enumerate(read_rows(table))
    )
    sizes = {table.path.name: [table.rows, table.path.stat().st_size] for table in tables}
    return Rows(sizes, sum(table.rows for table in tables), tasks)


def rows_of_questions(questions: Sequence[Question]) -> Rows:
    """Return the rows of your own questions."""
    tasks = (RowTask(question.id, OWN, question) for question in questions)
    return Rows({OWN: digest_of(questions)}, len(questions), tasks)


def digest_of(questions: Sequence[Question]) -> str:
    """Return a fingerprint of questions."""
    texts = [json.dumps(dataclasses.asdict(question)) for question in questions]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def prepare_rows(
    rows: Rows,
    folder: pathlib.Path,
    reading: Reading,
    pool: Workers[RowTask, ReadRow],
    check: Callable[[], None] = lambda: None,
) -> Summary:
    """Store rows as the splits `questions` and `conversations`.

    Args:
        rows: The rows.
        folder: Where to store them.
        reading: Settings of the conversion of rows.
        pool: Workers that call `read_row` with `reading`.
        check: Called after each row. It may raise to interrupt.

    Raises:
        ValueError: No row can be used.
    """
    plan = _plan(reading) | {"files": rows.files}
    # The name depends on the plan, so outcomes of another plan are never used.
    digest = hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:12]
    work = folder / WORK.replace("*", digest)
    folder.mkdir(parents=True, exist_ok=True)
    done = _count_outcomes(work)
    with work.open("ab") as file, Progress("prepare rows", "row") as progress:
        for row in _read(itertools.islice(rows.tasks, done, None), pool):
            file.write(_OUTCOME.dump_json(row) + b"\n")
            file.flush()
            done += 1
            progress.update(done, rows.count)
            check()
    summary = _store(folder, work)
    # Written last: its existence marks the set as complete.
    write_atomically(folder / PLAN, json.dumps(plan, indent=1) + "\n")
    for old in folder.glob(WORK):
        old.unlink()
    return summary


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A finished set.

    Attributes:
        root: Folder to which relative video paths refer.
        questions: The questions, in the order of the source.
        conversations: The conversations, in the order of the source.
        lengths: Length of each conversation in tokens.
        summary: Counts of its rows and videos.
        digest: Fingerprint of the set. It does not depend on where its sources are.
    """

    root: pathlib.Path
    questions: Sequence[Question]
    conversations: Sequence[Conversation]
    lengths: tuple[int, ...]
    summary: Summary
    digest: str


def known_summary(folder: pathlib.Path, reading: Reading) -> Summary | None:
    """Return the summary of a finished set, or None. The source files are not needed.

    Raises:
        ValueError: The set was prepared with other settings.
    """
    if not (folder / PLAN).exists():
        return None
    plan = _plan(reading)
    # The videos may have moved.
    del plan["root"]
    found = _read_plan(folder)
    require_same(
        f"{folder} holds a set prepared with other settings",
        {name: found.get(name) for name in plan},
        plan,
        "Name another folder, delete this one, or use its settings.",
    )
    return read_checked_json(folder / SUMMARY, Summary, _REMEDY)


def open_prepared(folder: pathlib.Path) -> Prepared:
    """Open a finished set.

    Raises:
        FileNotFoundError: The folder holds no finished set.
        ValueError: A file is damaged, or another version prepared the set.
    """
    if not (folder / PLAN).exists():
        raise FileNotFoundError(
            f"{folder}: holds no prepared set; prepare it first (python -m train.prepare)"
        )
    plan = _read_plan(folder)
    summary = read_checked_json(folder / SUMMARY, Summary, _REMEDY)
    require_sealed(folder / _RECORDS, _REMEDY)
    splits = datasets.open_splits(folder / _RECORDS)
    conversations = splits.get("conversations", ())
    lengths = [conversation.tokens for conversation in conversations]
    root = pathlib.Path(plan.pop("root"))
    # The same set may come from elsewhere.
    del plan["annotations"], plan["media"]
    digest = hashlib.sha256(json.dumps([plan, summary, lengths]).encode()).hexdigest()
    questions = splits.get("questions", ())
    return Prepared(root, questions, conversations, tuple(lengths), summary, digest)


def _plan(reading: Reading) -> dict[str, Any]:
    """Return the settings that determine the set, as JSON reads them back."""
    vocabulary = (pathlib.Path(reading.tokenizer) / "tokenizer.json").read_bytes()
    settings = dataclasses.asdict(reading)
    del settings["dialect"]  # that of the tokenizer
    plan = {
        "format": _FORMAT,
        **settings,
        # Compare the tokenizer by content: the same one may be in another folder.
        "tokenizer": hashlib.sha256(vocabulary).hexdigest(),
    }
    return json.loads(json.dumps(plan))


def _read_plan(folder: pathlib.Path) -> dict[str, Any]:
    plan = read_json(folder / PLAN, dict[str, Any], _REMEDY)
    if plan.get("format") != _FORMAT:
        raise ValueError(
            f"{folder}: another version prepared this set; name another folder, or delete this one "
            "and prepare it again"
        )
    return plan


def _count_outcomes(work: pathlib.Path) -> int:
    """Return the number of outcomes in a file, after cutting off what a kill left of the next."""
    if not work.exists():
        return 0
    with work.open("r+b") as file:
        count, end = 0, 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            count, end = count + 1, end + len(line)
        file.truncate(end)
    return count


def _read(tasks: Iterator[RowTask], pool: Workers[RowTask, ReadRow]) -> Iterator[ReadRow]:
    """Read rows in the worker processes, and yield them in order."""
    waiting: collections.deque[tuple[RowTask, Future[ReadRow]]] = collections.deque()
    while True:
        for task in itertools.islice(tasks, _AHEAD - len(waiting)):
            waiting.append((task, pool.submit(task)))
        if not waiting:
            return
        task, outcome = waiting.popleft()
        # Broad because no row may stop the others, whatever its files make a decoder do.
        try:
            yield outcome.result()
        except Exception as error:
            yield unread_row(task, error)


def _outcomes(work: pathlib.Path) -> Iterator[ReadRow]:
    with work.open("rb") as file:
        yield from map(_OUTCOME.validate_json, file)


def _records(work: pathlib.Path, kind: type[_Record]) -> Iterator[_Record]:
    for row in _outcomes(work):
        if isinstance(row.record, kind):
            yield row.record


def _store(folder: pathlib.Path, work: pathlib.Path) -> Summary:
    """Write the records, the rows that are left out, and the summary."""
    sources = collections.defaultdict(collections.Counter[str])
    kinds: collections.Counter[str] = collections.Counter()
    sizes: collections.Counter[str] = collections.Counter()
    longest = 0.0
    left_out = []
    for row in _outcomes(work):
        sources[row.source][row.reason or "kept"] += 1
        if row.record is None:
            fields = {name: getattr(row, name) for name in ("id", "source", "reason", "detail")}
            left_out.append(json.dumps(fields) + "\n")
            continue
        kinds[getattr(row.record, "kind", "conversation")] += 1
        sizes.update(f"{width}x{height}" for height, width in row.sizes)
        longest = max(longest, row.longest)
    write_atomically(folder / LEFT_OUT, "".join(left_out))
    if not kinds:
        # Otherwise the same rows would be left out again, after the files were mended.
        work.unlink()
        reasons = sum(sources.values(), collections.Counter[str]())
        named = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        raise ValueError(
            f"{folder}: none of {len(left_out)} rows can be used ({named or 'there are no rows'}); "
            f"see {folder / LEFT_OUT}, mend them, and prepare again"
        )
    splits = {}
    if kinds.total() > kinds["conversation"]:
        splits["questions"] = _records(work, Question)
    if kinds["conversation"]:
        splits["conversations"] = _records(work, Conversation)
    datasets.write_splits(folder / _RECORDS, splits)
    # Those of records that were there before, if any.
    (folder / _RECORDS / SUMS).unlink(missing_ok=True)
    require_sealed(folder / _RECORDS, _REMEDY)
    summary = Summary(
        sources={source: dict(rows) for source, rows in sources.items()},
        kinds=dict(kinds.most_common()),
        sizes=dict(sizes.most_common()),
        longest=longest,
    )
    write_checked_json(folder / SUMMARY, summary, indent=1)
    return summary
