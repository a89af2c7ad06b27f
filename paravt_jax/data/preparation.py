"""The published files into one prepared set: rows read by many processes, kept or left out with a reason, stored and summed up.

Owns the course of it. Every row is looked at by itself, its files opened and their first and last frame decoded, under a deadline: what a
row does costs that row alone. Chunks of rows are written down as they are done, so a preparation that was killed goes on.
Invariant: files, settings and videos decide what is stored, in the order of the files; every row is either stored or named in
`left_out.jsonl`, once.
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
from typing import Any

from paravt_jax.data import datasets
from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.published import Refused, Table, open_table, read_rows
from paravt_jax.data.row_reading import Kept, LeftOutRow, Reading, read_row
from paravt_jax.data.stored_settings import require_same
from paravt_jax.data.workers import WorkerError, Workers
from paravt_jax.method.conversations import Conversation
from paravt_jax.method.records import Question

SUMMARY, LEFT_OUT, LENGTHS, PLAN, _WORK = (
    "summary.json",
    "left_out.jsonl",
    "lengths.json",
    "plan.json",
    "work-",
)
_CHUNK = 64  # rows

Row = dict[str, Any] | Refused


def find_tables(folder: pathlib.Path) -> list[Table]:
    """The parquet files under a folder, in the order of their names. FileNotFoundError where there are none."""
    files = sorted(folder.rglob("*.parquet"), key=lambda path: path.name)
    if not files:
        raise FileNotFoundError(
            f"{folder}: no parquet files; give the folder of ParaVT/ParaVT-Parquet"
        )
    if twice := [
        name
        for name, count in collections.Counter(path.name for path in files).items()
        if count > 1
    ]:
        raise ValueError(
            f"{folder}: {twice[0]} is there twice; rows are named after their file, keep one"
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
    """Stores what the tables hold under `folder` as splits `questions` and `conversations`, and returns the summary; at once where that
    was done before. `deadline` in seconds, for a row; `tell(done, total)` hears of rows and may raise to stop.

    Raises ValueError where `folder` holds another set, and where no row could be kept.
    """
    plan = _plan(tables, reading)
    if (folder / PLAN).exists():
        _require_same(folder, plan)
        return json.loads((folder / SUMMARY).read_text())
    work = folder / (_WORK + hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:12])
    work.mkdir(parents=True, exist_ok=True)
    done, total = 0, sum(table.rows for table in tables)
    with Workers(functools.partial(read_row, reading), workers, deadline) as pool:
        for chunk_rows in _chunks(tables, work, pool, ahead=4 * workers):
            done += chunk_rows
            tell(done, total)
    outcomes = _Outcomes(work)
    splits = {
        name: records
        for name in ("questions", "conversations")
        if len(records := outcomes.records(name))
    }
    summary = _summarise(outcomes, [table.split for table in tables])
    write_atomically(folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
    write_atomically(
        folder / LEFT_OUT,
        "".join(json.dumps(dataclasses.asdict(left)) + "\n" for left in outcomes.left_out()),
    )
    write_atomically(
        folder / LENGTHS,
        json.dumps([row.tokens for row in outcomes.kept() if row.kind == "conversation"]),
    )
    if not splits:
        raise ValueError(
            f"{folder}: none of {total} rows can be used; {folder / LEFT_OUT} says why, the commonest: {_commonest(summary)}"
        )
    datasets.write_splits(folder / "records", splits)
    write_atomically(folder / PLAN, json.dumps(plan, indent=1) + "\n")
    for old in folder.glob(_WORK + "*"):
        shutil.rmtree(old)
    return summary


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A set that `prepare_rows` has finished: its records, the lengths of its conversations in tokens, the root of relative paths, and a
    fingerprint of all that but the root."""

    root: pathlib.Path
    questions: Sequence[Question]
    conversations: Sequence[Conversation]
    lengths: tuple[int, ...]
    summary: dict[str, Any]
    digest: str


def known_summary(folder: pathlib.Path, reading: Reading) -> dict[str, Any] | None:
    """The summary of a finished set, its files and root unseen; None where there is none. ValueError where it was read otherwise."""
    if not (folder / PLAN).exists():
        return None
    plan = _plan([], reading)
    del plan["files"], plan["root"]
    _require_same(folder, plan)
    return json.loads((folder / SUMMARY).read_text())


def open_prepared(folder: pathlib.Path) -> Prepared:
    """The set in a folder. FileNotFoundError where none has been finished there."""
    if not (folder / PLAN).exists():
        raise FileNotFoundError(
            f"{folder}: holds no prepared set; prepare it first (python -m train.prepare)"
        )
    plan, summary, lengths = (
        json.loads((folder / name).read_text()) for name in (PLAN, SUMMARY, LENGTHS)
    )
    there = {
        name: datasets.open_split(folder / "records", name) if count else ()
        for name, count in (
            ("questions", summary["kept"] - len(lengths)),
            ("conversations", len(lengths)),
        )
    }
    root = pathlib.Path(plan.pop("root"))
    digest = hashlib.sha256(json.dumps([plan, summary, lengths]).encode()).hexdigest()
    return Prepared(
        root, there["questions"], there["conversations"], tuple(lengths), summary, digest
    )


def _plan(tables: Sequence[Table], reading: Reading) -> dict[str, Any]:
    """What decides the set, as JSON brings it back."""
    files = {table.path.name: [table.rows, table.path.stat().st_size] for table in tables}
    tokenizer = hashlib.sha256(
        (pathlib.Path(reading.tokenizer) / "tokenizer.json").read_bytes()
    ).hexdigest()
    return json.loads(
        json.dumps({"files": files, **dataclasses.asdict(reading), "tokenizer": tokenizer})
    )


def _require_same(folder: pathlib.Path, plan: dict[str, Any]) -> None:
    """Raises ValueError where a field of `plan` is another in the plan that is stored."""
    found = json.loads((folder / PLAN).read_text())
    require_same(
        f"{folder} holds a set prepared otherwise",
        {name: value for name, value in found.items() if name in plan},
        plan,
        "Name another folder, delete this one, or ask for what it holds.",
    )


def _chunks(
    tables: Sequence[Table], work: pathlib.Path, pool: Workers, ahead: int
) -> Iterator[int]:
    """Does every chunk of rows that is not there yet; yields the number of rows of each chunk that is."""
    waiting: collections.deque[tuple[pathlib.Path, list[tuple[str, str, Any]]]] = (
        collections.deque()
    )
    for table in tables:
        for number, rows in enumerate(_batched(read_rows(table))):
            file = work / f"{table.path.stem}-{number:06d}.jsonl"
            if file.exists():
                yield len(rows)
                continue
            ids = [f"{table.path.stem}:{number * _CHUNK + n}" for n in range(len(rows))]
            futures = [
                pool.submit((table.rl, id, table.split, row))
                for id, row in zip(ids, rows, strict=True)
            ]
            waiting.append(
                (file, [(id, table.split, future) for id, future in zip(ids, futures, strict=True)])
            )
            while len(waiting) * _CHUNK > ahead + _CHUNK:
                yield _finish(*waiting.popleft())
    while waiting:
        yield _finish(*waiting.popleft())


def _batched(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _CHUNK:
            yield batch
            batch = []
    if batch:
        yield batch


def _finish(file: pathlib.Path, futures: Sequence[tuple[str, str, Any]]) -> int:
    """Writes a chunk down when its rows are done."""
    lines = []
    for id, source, future in futures:
        try:
            outcome = future.result()
        except WorkerError as error:
            outcome = LeftOutRow.by_worker(id, source, error)
        if isinstance(outcome, LeftOutRow):
            lines.append({"left_out": dataclasses.asdict(outcome)})
        else:
            kind, text = datasets.encode(outcome[1])
            lines.append({"kept": dataclasses.asdict(outcome[0]), "kind": kind, "record": text})
    write_atomically(file, "".join(json.dumps(line) + "\n" for line in lines))
    return len(futures)


class _Outcomes:
    """What became of the rows, chunk by chunk from the disk, in the order of the files."""

    def __init__(self, work: pathlib.Path):
        self._files = sorted(work.glob("*.jsonl"))

    def lines(self) -> Iterator[dict[str, Any]]:
        for file in self._files:
            yield from _read(file)

    def kept(self) -> Iterator[Kept]:
        for line in self.lines():
            if "kept" in line:
                yield Kept(**line["kept"])

    def left_out(self) -> Iterator[LeftOutRow]:
        for line in self.lines():
            if "left_out" in line:
                yield LeftOutRow(**line["left_out"])

    def records(self, split: str) -> Sequence[Any]:
        return _Records(self._files, split.removesuffix("s"))


class _Records(Sequence):
    """The records of one kind, read from the chunks when they are asked for: all of them at once may be more than fits into memory."""

    def __init__(self, files: Sequence[pathlib.Path], kind: str):
        self._where = [
            (file, n)
            for file in files
            for n, line in enumerate(_read(file))
            if line.get("kind") == kind
        ]
        self._chunk: tuple[pathlib.Path, list[dict[str, Any]]] | None = None

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, index):  # asked for in order
        file, n = self._where[index]
        if self._chunk is None or self._chunk[0] != file:
            self._chunk = file, _read(file)
        line = self._chunk[1][n]
        return datasets.decode(line["kind"], line["record"])


def _read(file: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _summarise(outcomes: _Outcomes, sources: Sequence[str]) -> dict[str, Any]:
    """Counts of rows by source, kind and reason; quantiles of durations in seconds and of lengths in tokens."""
    kept, left = list(outcomes.kept()), list(outcomes.left_out())
    conversations = [row for row in kept if row.kind == "conversation"]
    return {
        "rows": len(kept) + len(left),
        "kept": len(kept),
        "left_out": len(left),
        "reasons": dict(collections.Counter(str(row.reason) for row in left).most_common()),
        "sources": {
            source: {
                "kept": sum(row.source == source for row in kept),
                "left_out": dict(
                    collections.Counter(
                        str(row.reason) for row in left if row.source == source
                    ).most_common()
                ),
            }
            for source in dict.fromkeys(sources)
        },
        "kinds": dict(collections.Counter(row.kind for row in kept).most_common()),
        "seconds": _quantiles([seconds for row in kept for seconds in row.seconds]),
        "tokens": _quantiles([row.tokens for row in conversations]),
        "tokens_in_all": sum(row.tokens for row in conversations),
        "frames": _quantiles([row.frames for row in conversations]),
        "with_calls": sum(row.calls > 0 for row in conversations),
        "without_think": sum(not row.thinks for row in conversations),
        "without_answer_tags": sum(not row.answers for row in conversations),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    """Least, median, mean, nine tenths and most."""
    if not values:
        return {}
    ordered = sorted(values)
    at = {"least": 0.0, "median": 0.5, "nine_tenths": 0.9, "most": 1.0}
    found = {
        name: ordered[min(math.floor(share * len(ordered)), len(ordered) - 1)]
        for name, share in at.items()
    }
    return {
        name: round(float(value), 3)
        for name, value in (found | {"mean": sum(ordered) / len(ordered)}).items()
    }


def _commonest(summary: dict[str, Any]) -> str:
    return next(iter(summary["reasons"]), "there are no rows")
