"""Turns published files into one prepared set, with several processes.

Each row is read on its own, under a deadline: its videos are opened, and their first and last frame
decoded. A bad row does not affect the others. Every row is either stored or listed once in
`left_out.jsonl` with a reason, in the order of the files.

The outcome of each row is appended to a file, so an interrupted preparation goes on with the next:

    FOLDER/work-<digest>.jsonl    outcomes of the rows so far; deleted at the end
    FOLDER/records/               the stored splits
    FOLDER/summary.json, left_out.jsonl, lengths.json
    FOLDER/sums.json              checksums of the files above, left_out.jsonl aside
    FOLDER/plan.json              the settings of the set; written last
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from typing_extensions import TypedDict

from paravt_jax.data import datasets
from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.datasets import Record
from paravt_jax.data.file_sums import SUMS, find_damage, read_sums, write_sums
from paravt_jax.data.published import Table, open_table, read_rows
from paravt_jax.data.row_reading import (
    Reading,
    ReadRow,
    RowTask,
    read_row,
    unread_row,
)
from paravt_jax.data.stored_json import DamagedFileError, read_json
from paravt_jax.data.stored_settings import require_same
from paravt_jax.data.workers import Workers
from paravt_jax.method.conversations import Conversation
from paravt_jax.method.records import Question

SUMMARY = "summary.json"
LEFT_OUT = "left_out.jsonl"
LENGTHS = "lengths.json"
# Written last: if it exists, the set is complete.
PLAN = "plan.json"
WORK = "work-*.jsonl"

# Rows beyond those that the workers read, so that a slow one does not keep the others waiting.
_AHEAD = 64
_REMEDY = "restore it, or delete the folder and prepare the set again"
_RECORDS = "records"
# Part of every plan. Change it whenever the same files give other records.
_FORMAT = 3


class _Summary(TypedDict):
    """What a run reads of summary.json."""

    rows: int
    kept: int
    sources: dict[str, dict[str, int]]
    seconds: dict[str, float]
    sizes: dict[str, int]


def find_tables(folder: pathlib.Path) -> list[Table]:
    """Open the parquet files below a folder, sorted by name.

    Raises:
        FileNotFoundError: There are none.
        ValueError: Two files have the same name, or a file is not in the published format.
    """
    files = sorted(folder.rglob("*.parquet"), key=lambda path: path.name)
    if not files:
        raise FileNotFoundError(
            f"{folder}: no parquet files; give the folder of ParaVT/ParaVT-Parquet"
        )
    for file, next_file in zip(files, files[1:], strict=False):
        if file.name == next_file.name:
            raise ValueError(
                f"{folder}: {file.name} occurs twice, but rows are named after their file; keep one"
            )
    return [open_table(path) for path in files]


def prepare_rows(
    tables: Sequence[Table],
    folder: pathlib.Path,
    reading: Reading,
    *,
    workers: int,
    deadline: float,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Store the rows of all tables in `folder`, unless a finished set is there already.

    Args:
        tables: The published files.
        folder: Where to store the splits `questions` and `conversations`, and the summary.
        reading: Settings of the conversion of rows.
        workers: Number of worker processes.
        deadline: Time limit for one row, in seconds.
        tell: Called with the number of rows done and the total. It may raise to interrupt.

    Returns:
        The summary: counts of rows by source, kind and reason, and ranges of lengths.

    Raises:
        ValueError: `folder` holds another set, or no row can be used.
    """
    known = known_summary(folder, reading)
    if known is not None:
        return known
    plan = _plan(tables, reading)
    # The name depends on the plan, so outcomes of another plan are never used.
    digest = hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:12]
    work = folder / WORK.replace("*", digest)
    folder.mkdir(parents=True, exist_ok=True)

    total = sum(table.rows for table in tables)
    with Workers(functools.partial(read_row, reading), workers, deadline) as pool:
        for done in _read_rest(tables, work, pool, ahead=_AHEAD + workers):
            tell(done, total)

    summary = _store(folder, work, [table.split for table in tables])
    records = [file for file in (folder / _RECORDS).rglob("*") if file.is_file()]
    write_sums(folder, [folder / SUMMARY, folder / LENGTHS, *records])
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
        questions: The questions, in the order of the files.
        conversations: The conversations, in the order of the files.
        lengths: Length of each conversation in tokens.
        digest: Fingerprint of the set. It does not depend on where its sources are.
    """

    root: pathlib.Path
    questions: Sequence[Question]
    conversations: Sequence[Conversation]
    lengths: tuple[int, ...]
    digest: str


def known_summary(folder: pathlib.Path, reading: Reading) -> dict[str, Any] | None:
    """Return the summary of a finished set, or None. The source files are not needed.

    Raises:
        ValueError: The set was prepared with other settings.
    """
    if not (folder / PLAN).exists():
        return None
    plan = _plan([], reading)
    # The source files may be gone, and the videos may have moved.
    del plan["files"], plan["root"]
    found = _read_plan(folder)
    require_same(
        f"{folder} holds a set prepared with other settings",
        {name: found.get(name) for name in plan},
        plan,
        "Name another folder, delete this one, or use its settings.",
    )
    return read_json(folder / SUMMARY, _Summary, _REMEDY)


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
    sums = read_sums(folder)
    if sums is None:
        raise DamagedFileError(f"{folder / SUMS}: does not exist; {_REMEDY}")
    damage = find_damage(folder, sums)
    if damage:
        raise DamagedFileError(f"{folder / damage[0]}; {_REMEDY}")
    summary = read_json(folder / SUMMARY, _Summary, _REMEDY)
    lengths = read_json(folder / LENGTHS, list[int], _REMEDY)
    root = pathlib.Path(plan.pop("root"))
    # The same set may come from elsewhere.
    del plan["annotations"], plan["media"]
    digest = hashlib.sha256(json.dumps([plan, summary, lengths]).encode()).hexdigest()
    return Prepared(
        root=root,
        questions=_open_split(folder, "questions", summary["kept"] - len(lengths)),
        conversations=_open_split(folder, "conversations", len(lengths)),
        lengths=tuple(lengths),
        digest=digest,
    )


def _open_split(folder: pathlib.Path, name: str, count: int) -> Sequence[Any]:
    """Open a split, or return () if it is empty: empty splits are not stored."""
    return datasets.open_split(folder / _RECORDS, name) if count else ()


def _plan(tables: Sequence[Table], reading: Reading) -> dict[str, Any]:
    """All inputs that determine the set, as JSON reads them back."""
    files = {table.path.name: [table.rows, table.path.stat().st_size] for table in tables}
    vocabulary = (pathlib.Path(reading.tokenizer) / "tokenizer.json").read_bytes()
    plan = {
        "format": _FORMAT,
        "files": files,
        **dataclasses.asdict(reading),
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


def _read_rest(
    tables: Sequence[Table], work: pathlib.Path, pool: Workers, ahead: int
) -> Iterator[int]:
    """Read the rows that have no outcome yet. Yields the number of rows that have one."""
    done = _count_outcomes(work)
    yield done
    tasks = itertools.islice(_tasks(tables), done, None)
    with work.open("a", encoding="utf-8") as file:
        for task, outcome in _submitted(pool, tasks, ahead):
            # Broad because no row may stop the others, whatever its files make a decoder do.
            try:
                row = outcome.result()
            except Exception as error:
                row = unread_row(task, error)
            file.write(json.dumps(_as_line(row)) + "\n")
            file.flush()
            done += 1
            yield done


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


def _tasks(tables: Sequence[Table]) -> Iterator[RowTask]:
    for table in tables:
        for number, columns in enumerate(read_rows(table)):
            yield RowTask(f"{table.path.stem}:{number}", table.split, table.rl, columns)


def _submitted(
    pool: Workers, tasks: Iterable[RowTask], ahead: int
) -> Iterator[tuple[RowTask, Future]]:
    """Hand tasks to the workers, and yield them in order, `ahead` of which are submitted before."""
    waiting: collections.deque[tuple[RowTask, Future]] = collections.deque()
    for task in tasks:
        waiting.append((task, pool.submit(task)))
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting


def _as_line(row: ReadRow) -> dict[str, Any]:
    """Return an outcome as JSON. A kept row has the fields `kind` and `record` of its record."""
    if row.record is None:
        return {name: getattr(row, name) for name in ("id", "source", "reason", "detail")}
    kind, record = datasets.encode(row.record)
    counted = row.record.kind if isinstance(row.record, Question) else kind
    facts = {"source": row.source, "counted": counted, "seconds": row.seconds, "sizes": row.sizes}
    return {**facts, "kind": kind, "record": record}


def _lines(work: pathlib.Path) -> Iterator[dict[str, Any]]:
    with work.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


class _Records:
    """The records of one kind, read from the outcomes whenever they are iterated."""

    def __init__(self, work: pathlib.Path, kind: str):
        self._work = work
        self._kind = kind

    def __iter__(self) -> Iterator[Record]:
        for line in _lines(self._work):
            if line.get("kind") == self._kind:
                yield datasets.decode(line["kind"], line["record"])


def _store(folder: pathlib.Path, work: pathlib.Path, sources: Sequence[str]) -> dict[str, Any]:
    """Write the records, the rows that are left out, the lengths, and the summary.

    Returns:
        The summary. Durations are in seconds, sizes of videos are width x height in pixels, and the
        rows of each source are counted as `kept` or by the reason why they are left out.
    """
    by_source = {source: collections.Counter(kept=0) for source in sources}
    kinds: collections.Counter[str] = collections.Counter()
    sizes: collections.Counter[str] = collections.Counter()
    seconds: list[float] = []
    left_out = []
    for line in _lines(work):
        by_source[line["source"]][line.get("reason", "kept")] += 1
        if "reason" in line:
            left_out.append(json.dumps(line) + "\n")
            continue
        kinds[line["counted"]] += 1
        sizes.update(f"{width}x{height}" for height, width in line["sizes"])
        seconds += line["seconds"]
    write_atomically(folder / LEFT_OUT, "".join(left_out))
    if not kinds:
        reasons = sum(by_source.values(), collections.Counter())
        named = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        raise ValueError(
            f"{folder}: none of {len(left_out)} rows can be used ({named or 'there are no rows'}); "
            f"see {folder / LEFT_OUT}"
        )
    conversations = _Records(work, "conversation")
    lengths = [record.tokens for record in conversations if isinstance(record, Conversation)]
    splits = {"questions": _Records(work, "question"), "conversations": conversations}
    datasets.write_splits(
        folder / _RECORDS,
        {name: records for name, records in splits.items() if any(True for _ in records)},
    )
    summary = {
        "rows": kinds.total() + len(left_out),
        "kept": kinds.total(),
        "sources": by_source,
        "kinds": dict(kinds.most_common()),
        "sizes": dict(sizes.most_common()),
        "seconds": _range(seconds),
        "tokens": _range(lengths),
    }
    write_atomically(folder / LENGTHS, json.dumps(lengths))
    write_atomically(folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
    return summary


def _range(values: Sequence[float]) -> dict[str, float]:
    return {"least": min(values), "most": max(values)} if values else {}
