"""Turns published files into one prepared set, with several processes.

Each row is read on its own, under a deadline: its videos are opened, and their first and last frame
decoded. A bad row does not affect the others. Every row is either stored or listed once in
`left_out.jsonl` with a reason, in the order of the files.

Finished chunks of rows are written to a work folder, so an interrupted preparation resumes:

    FOLDER/work-<digest>/<file>-000000.jsonl   outcomes of 64 rows; deleted at the end
    FOLDER/records/                            the stored splits
    FOLDER/summary.json, left_out.jsonl, lengths.json
    FOLDER/sums.json                           checksums of the files above, left_out.jsonl aside
    FOLDER/plan.json                           the settings of the set; written last
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypedDict

from paravt_jax.data import datasets
from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.datasets import Record
from paravt_jax.data.file_sums import SUMS, find_damage, read_sums, write_sums
from paravt_jax.data.published import Refused, Table, open_table, read_rows
from paravt_jax.data.row_reading import Kept, LeftOutRow, Reading, read_row
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
# Rows per file of the work folder. An interruption loses the rows of unfinished chunks.
CHUNK_ROWS = 64

_REMEDY = "restore it, or delete the folder and prepare the set again"
_WORK_PREFIX = "work-"
_RECORDS = "records"
# Part of every plan. Change it whenever the same files give other records.
_FORMAT = 2

Row = dict[str, Any] | Refused


class _Summary(TypedDict):
    """What a run reads of summary.json."""

    rows: int
    kept: int
    reasons: dict[str, int]
    seconds: dict[str, float]
    sizes: dict[str, int]


_Outcome = tuple[Kept, Question | Conversation] | LeftOutRow


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
        The summary: counts of rows by source, kind and reason, and quantiles of lengths.

    Raises:
        ValueError: `folder` holds another set, or no row can be used.
    """
    plan = _plan(tables, reading)
    if (folder / PLAN).exists():
        _require_same(folder, plan)
        return read_json(folder / SUMMARY, _Summary, _REMEDY)
    # The work folder's name depends on the plan and on what is noted of a row, so chunks of another
    # plan or version are never reused.
    noted = [field.name for field in dataclasses.fields(Kept)]
    digest = hashlib.sha256(json.dumps([plan, noted]).encode()).hexdigest()[:12]
    work = folder / f"{_WORK_PREFIX}{digest}"
    work.mkdir(parents=True, exist_ok=True)

    done = 0
    total = sum(table.rows for table in tables)
    with Workers(functools.partial(read_row, reading), workers, deadline) as pool:
        for rows in _read_chunks(tables, work, pool, rows_ahead=4 * workers):
            done += rows
            tell(done, total)

    outcomes = _Outcomes(work)
    summary = _summarise(outcomes, [table.split for table in tables])
    _write_reports(folder, outcomes, summary)
    _write_records(folder, outcomes, summary)
    records = [file for file in (folder / _RECORDS).rglob("*") if file.is_file()]
    write_sums(folder, [folder / SUMMARY, folder / LENGTHS, *records])
    # Written last: its existence marks the set as complete.
    write_atomically(folder / PLAN, json.dumps(plan, indent=1) + "\n")
    for old in folder.glob(_WORK_PREFIX + "*"):
        shutil.rmtree(old)
    return summary


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A finished set.

    Attributes:
        root: Folder to which relative video paths refer.
        questions: The questions, in the order of the files.
        conversations: The conversations, in the order of the files.
        lengths: Length of each conversation in tokens.
        summary: The result of `prepare_rows`.
        digest: Fingerprint of the set. It does not depend on the root.
    """

    root: pathlib.Path
    questions: Sequence[Question]
    conversations: Sequence[Conversation]
    lengths: tuple[int, ...]
    summary: dict[str, Any]
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
    _require_same(folder, plan)
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
    plan = read_plan(folder)
    sums = read_sums(folder)
    if sums is None:
        raise DamagedFileError(f"{folder / SUMS}: does not exist; {_REMEDY}")
    damage = find_damage(folder, sums)
    if damage:
        raise DamagedFileError(f"{folder / damage[0]}; {_REMEDY}")
    summary = read_json(folder / SUMMARY, _Summary, _REMEDY)
    lengths = read_json(folder / LENGTHS, list[int], _REMEDY)
    root = pathlib.Path(plan.pop("root"))
    digest = hashlib.sha256(json.dumps([plan, summary, lengths]).encode()).hexdigest()
    return Prepared(
        root=root,
        questions=_open_split(folder, "questions", summary["kept"] - len(lengths)),
        conversations=_open_split(folder, "conversations", len(lengths)),
        lengths=tuple(lengths),
        summary=summary,
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


def read_plan(folder: pathlib.Path) -> dict[str, Any]:
    """Read the stored plan. Raises ValueError if another version of this project wrote it."""
    plan = read_json(folder / PLAN, dict[str, Any], _REMEDY)
    if plan.get("format") != _FORMAT:
        raise ValueError(
            f"{folder}: another version prepared this set, which reads the sizes and times of some "
            "videos differently; name another folder, or delete this one and prepare it again"
        )
    return plan


def _require_same(folder: pathlib.Path, plan: dict[str, Any]) -> None:
    """Raise ValueError if a field of `plan` differs from the stored plan."""
    found = read_plan(folder)
    require_same(
        f"{folder} holds a set prepared with other settings",
        {name: value for name, value in found.items() if name in plan},
        plan,
        "Name another folder, delete this one, or use its settings.",
    )


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A row that a worker is reading."""

    id: str
    source: str
    outcome: Future[_Outcome]


def _read_chunks(
    tables: Sequence[Table], work: pathlib.Path, pool: Workers, rows_ahead: int
) -> Iterator[int]:
    """Read all rows that are not in the work folder yet. Yields the rows of each finished chunk."""
    pending: collections.deque[tuple[pathlib.Path, list[_Pending]]] = collections.deque()
    for table in tables:
        for number, rows in enumerate(_batched(read_rows(table))):
            file = work / f"{table.path.stem}-{number:06d}.jsonl"
            if file.exists():
                yield len(rows)
                continue
            pending.append((file, _submit(pool, table, number * CHUNK_ROWS, rows)))
            # Submit enough rows to keep all workers busy across the end of a chunk. More would only
            # take memory, because waiting rows are held here.
            while len(pending) * CHUNK_ROWS > rows_ahead + CHUNK_ROWS:
                yield _finish(*pending.popleft())
    while pending:
        yield _finish(*pending.popleft())


def _batched(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == CHUNK_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _submit(pool: Workers, table: Table, first: int, rows: Sequence[Row]) -> list[_Pending]:
    """Hand rows to the workers; `first` is the number of the first row in its file."""
    pending = []
    for number, row in enumerate(rows, first):
        id = f"{table.path.stem}:{number}"
        future = pool.submit((table.rl, id, table.split, row))
        pending.append(_Pending(id, table.split, future))
    return pending


def _finish(file: pathlib.Path, pending: Sequence[_Pending]) -> int:
    """Wait for the rows of a chunk and write their outcomes. Returns the number of rows."""
    lines = []
    for row in pending:
        # Broad because no row may stop the others, whatever its files make a decoder do.
        try:
            outcome = row.outcome.result()
        except Exception as error:
            outcome = LeftOutRow.by_worker(row.id, row.source, error)
        if isinstance(outcome, LeftOutRow):
            lines.append({"left_out": dataclasses.asdict(outcome)})
        else:
            facts, record = outcome
            kind, text = datasets.encode(record)
            lines.append({"kept": dataclasses.asdict(facts), "kind": kind, "record": text})
    # Write the whole chunk at once: if its file exists, the chunk is done.
    write_atomically(file, "".join(json.dumps(line) + "\n" for line in lines))
    return len(pending)


class _Outcomes:
    """The outcomes of all rows, read from the chunks in the order of the files."""

    def __init__(self, work: pathlib.Path):
        self._files = sorted(work.glob("*.jsonl"))

    def kept(self) -> Iterator[Kept]:
        for line in self._lines():
            if "kept" in line:
                facts = line["kept"]
                # JSON reads a tuple back as a list.
                sizes = tuple(map(tuple, facts["sizes"]))
                yield Kept(**(facts | {"seconds": tuple(facts["seconds"]), "sizes": sizes}))

    def left_out(self) -> Iterator[LeftOutRow]:
        for line in self._lines():
            if "left_out" in line:
                yield LeftOutRow(**line["left_out"])

    def records(self, split: str) -> Sequence[Record]:
        return _Records(self._files, split.removesuffix("s"))

    def _lines(self) -> Iterator[dict[str, Any]]:
        for file in self._files:
            yield from _read_lines(file)


class _Records(Sequence[Record]):
    """The records of one kind, read from the chunks on access because all may not fit in memory.

    The latest chunk stays in memory, so sequential access is fast.
    """

    def __init__(self, files: Sequence[pathlib.Path], kind: str):
        self._places = [
            (file, line_number)
            for file in files
            for line_number, line in enumerate(_read_lines(file))
            if line.get("kind") == kind
        ]
        self._file: pathlib.Path | None = None
        self._lines: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index):
        file, line_number = self._places[index]
        if self._file != file:
            self._file = file
            self._lines = _read_lines(file)
        line = self._lines[line_number]
        return datasets.decode(line["kind"], line["record"])


def _read_lines(file: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _write_reports(folder: pathlib.Path, outcomes: _Outcomes, summary: dict[str, Any]) -> None:
    write_atomically(folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
    left_out = [json.dumps(dataclasses.asdict(row)) + "\n" for row in outcomes.left_out()]
    write_atomically(folder / LEFT_OUT, "".join(left_out))
    lengths = [row.tokens for row in outcomes.kept() if row.kind == "conversation"]
    write_atomically(folder / LENGTHS, json.dumps(lengths))


def _write_records(folder: pathlib.Path, outcomes: _Outcomes, summary: dict[str, Any]) -> None:
    splits = {name: outcomes.records(name) for name in ("questions", "conversations")}
    splits = {name: records for name, records in splits.items() if len(records)}
    if not splits:
        reasons = [f"{count} {reason}" for reason, count in summary["reasons"].items()]
        raise ValueError(
            f"{folder}: none of {summary['rows']} rows can be used "
            f"({', '.join(reasons) or 'there are no rows'}); see {folder / LEFT_OUT}"
        )
    datasets.write_splits(folder / _RECORDS, splits)


def _summarise(outcomes: _Outcomes, sources: Sequence[str]) -> dict[str, Any]:
    """Count rows by source, kind, reason, and size of video (width x height in pixels).

    Durations are in seconds, lengths in tokens.
    """
    kept = list(outcomes.kept())
    left_out = list(outcomes.left_out())
    conversations = [row for row in kept if row.kind == "conversation"]
    by_source = {
        source: {
            "kept": sum(row.source == source for row in kept),
            "left_out": _count(row.reason for row in left_out if row.source == source),
        }
        for source in dict.fromkeys(sources)
    }
    return {
        "rows": len(kept) + len(left_out),
        "kept": len(kept),
        "left_out": len(left_out),
        "reasons": _count(row.reason for row in left_out),
        "sources": by_source,
        "kinds": _count(row.kind for row in kept),
        "sizes": _count(f"{width}x{height}" for row in kept for height, width in row.sizes),
        "seconds": _quantiles([seconds for row in kept for seconds in row.seconds]),
        "tokens": _quantiles([row.tokens for row in conversations]),
        "tokens_in_all": sum(row.tokens for row in conversations),
        "frames": _quantiles([row.frames for row in conversations]),
        "with_calls": sum(row.calls > 0 for row in conversations),
        "without_think": sum(not row.thinks for row in conversations),
        "without_answer_tags": sum(not row.answers for row in conversations),
        "without_frame_numbers": sum(row.ignored_frame_numbers > 0 for row in conversations),
    }


def _count(values: Iterable[str]) -> dict[str, int]:
    """How often each value occurs, the most frequent first."""
    return dict(collections.Counter(str(value) for value in values).most_common())


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median, 90th percentile, maximum and mean, rounded to three digits."""
    if not values:
        return {}
    ordered = sorted(values)
    shares = {"least": 0.0, "median": 0.5, "nine_tenths": 0.9, "most": 1.0}
    found: dict[str, float] = {}
    for name, share in shares.items():
        position = min(math.floor(share * len(ordered)), len(ordered) - 1)
        found[name] = round(float(ordered[position]), 3)
    found["mean"] = round(float(sum(ordered) / len(ordered)), 3)
    return found
