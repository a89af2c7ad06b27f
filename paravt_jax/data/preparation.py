"""Turns the examples of a source into one prepared set, with several processes.

    published tables, or your own questions -> `Examples` -> `read_example` -> records

Each example is read on its own by a worker process, under a deadline: its videos are opened, and
their first and last frame decoded. A bad example does not affect the others. Every one is either
stored or listed once in `left_out.jsonl` with a reason, in the order of the source.

The outcome of each is appended to a file, so an interrupted preparation goes on with the next:

    FOLDER/work-<digest>.jsonl    outcomes of the examples so far; deleted at the end
    FOLDER/records/               the stored splits
    FOLDER/left_out.jsonl         the examples that are not used
    FOLDER/set.json               settings and counts of the set; written last
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pydantic
from tqdm import tqdm
from typing_extensions import TypedDict

from paravt_jax.data import datasets
from paravt_jax.data.example_reading import (
    Example,
    ExampleReading,
    Outcome,
    left_out,
    read_example,
)
from paravt_jax.data.frame_reader import PATIENCE
from paravt_jax.data.published import open_table, read_table
from paravt_jax.data.stored import (
    read_checked_json,
    require_same,
    write_atomically,
    write_checked_json,
)
from paravt_jax.data.workers import Workers
from paravt_jax.method.conversations import Conversation
from paravt_jax.method.records import Question

LEFT_OUT = "left_out.jsonl"
# Written last: if it exists, the set is complete.
SET = "set.json"
OWN = "questions"
"""Source of your own questions."""

# Examples that are submitted in advance, so that a slow one does not delay the others.
_AHEAD = 128
_REMEDY = "restore it, or delete the folder and prepare the set again"
_RECORDS = "records"
# Fields of an outcome in `LEFT_OUT`.
_LISTED = {"id", "source", "reason", "detail"}
# Part of every set. Change it whenever the same files give other records.
_FORMAT = 9
_OUTCOME = pydantic.TypeAdapter(Outcome)


class Summary(TypedDict):
    """Counts of a set."""

    sources: dict[str, dict[str, int]]
    """Examples of each source, by the reason why they are left out, or as `kept`."""
    sizes: list[list[int]]
    """The different (height, width) of videos and pictures in pixels, the most frequent first."""
    lengths: list[int]
    """Length of each conversation, in tokens."""


class _Set(TypedDict):
    """The content of set.json."""

    settings: dict[str, Any]
    files: dict[str, Any]
    root: str
    summary: Summary


@dataclasses.dataclass(frozen=True)
class Examples:
    """The examples of a source.

    Attributes:
        files: Fingerprint of their sources.
        count: Their number.
        ordered: The examples, in order.
    """

    files: dict[str, Any]
    count: int
    ordered: Iterator[Example]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A finished set.

    Attributes:
        root: Folder to which relative video paths refer.
        questions: The questions, in the order of the source.
        conversations: The conversations, in the order of the source.
        summary: Counts of its examples and videos.
        digest: Fingerprint of the set. It does not depend on where its sources are.
    """

    root: pathlib.Path
    questions: Sequence[Question]
    conversations: Sequence[Conversation]
    summary: Summary
    digest: str


def examples_of_tables(folder: pathlib.Path) -> Examples:
    """Open the parquet files below a folder, in the order of their paths.

    Raises:
        FileNotFoundError: There are none.
        ValueError: One is not in the published format.
    """
    files = sorted(folder.rglob("*.parquet"))
    if not files:
        raise FileNotFoundError(
            f"{folder}: no parquet files; give the folder of ParaVT/ParaVT-Parquet"
        )
    # Tables in different folders may have the same name, and an id names one example.
    tables = {
        path.relative_to(folder).with_suffix("").as_posix(): open_table(path) for path in files
    }
    examples = (
        Example(f"{name}:{number}", name, columns)
        for name, table in tables.items()
        for number, columns in enumerate(read_table(table))
    )
    sizes = {name: [table.count, table.path.stat().st_size] for name, table in tables.items()}
    return Examples(sizes, sum(table.count for table in tables.values()), examples)


def examples_of_questions(questions: Sequence[Question]) -> Examples:
    """Return your own questions as examples."""
    examples = (Example(question.id, OWN, question) for question in questions)
    return Examples({OWN: digest_of(questions)}, len(questions), examples)


def digest_of(questions: Sequence[Question]) -> str:
    """Return a fingerprint of questions."""
    texts = [json.dumps(dataclasses.asdict(question)) for question in questions]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def open_prepared(folder: pathlib.Path, reading: ExampleReading) -> Prepared | None:
    """Open a finished set, or return None. The source files are not needed.

    Raises:
        ValueError: A file is damaged, or the set was prepared with other settings.
    """
    if not (folder / SET).exists():
        return None
    stored: _Set = read_checked_json(folder / SET, _Set, _REMEDY)
    settings = stored["settings"]
    require_same(
        f"{folder} holds a set prepared with other settings",
        settings,
        _settings(reading),
        f"Delete {folder}, name another --data.folder (--run-dir for your own questions), or use "
        "its settings.",
    )
    # Somebody may have deleted damaged records, as their error asks.
    if not datasets.is_prepared(folder / _RECORDS):
        return None
    splits = datasets.open_splits(folder / _RECORDS)
    # The same set may come from elsewhere.
    del settings["annotations"], settings["media"]
    return Prepared(
        root=pathlib.Path(stored["root"]),
        questions=splits.get("questions", ()),
        conversations=splits.get("conversations", ()),
        summary=stored["summary"],
        digest=_digest([settings, stored["files"], stored["summary"]]),
    )


def prepare_examples(
    examples: Examples,
    folder: pathlib.Path,
    reading: ExampleReading,
    check: Callable[[], None] = lambda: None,
    deadline: float = PATIENCE,
) -> Prepared:
    """Store examples as the splits `questions` and `conversations`, and open them.

    Args:
        examples: The examples.
        folder: Where to store them.
        reading: Settings of the conversion to records.
        check: Called after each example. It may raise to interrupt.
        deadline: Seconds that reading one example may take.

    Raises:
        ValueError: No example can be used.
    """
    settings = _settings(reading)
    # The name depends on the settings, so outcomes of others are never used.
    work = folder / f"work-{_digest([settings, reading.root, examples.files])[:12]}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    done = _count_outcomes(work)
    left = itertools.islice(examples.ordered, done, None)
    with (
        work.open("ab") as file,
        Workers(functools.partial(read_example, reading), os.cpu_count() or 1, deadline) as pool,
        tqdm(desc="prepare data", total=examples.count, initial=done, unit="example") as bar,
    ):
        for outcome in _read(left, pool):
            file.write(_OUTCOME.dump_json(outcome) + b"\n")
            file.flush()
            bar.update()
            check()
    summary = _store(folder, work)
    content = _Set(settings=settings, files=examples.files, root=reading.root, summary=summary)
    write_checked_json(folder / SET, content, indent=1)
    for old in folder.glob("work-*.jsonl"):
        old.unlink()
    prepared = open_prepared(folder, reading)
    assert prepared is not None, "it was just written"
    return prepared


def _settings(reading: ExampleReading) -> dict[str, Any]:
    """Return the settings that determine the set, as JSON reads them back."""
    settings = dataclasses.asdict(reading) | {"format": _FORMAT}
    # The videos may have moved, and the dialect is that of the tokenizer.
    del settings["root"], settings["dialect"]
    # Compare the tokenizer by content: the same one may be in another folder.
    vocabulary = (pathlib.Path(reading.tokenizer) / "tokenizer.json").read_bytes()
    settings["tokenizer"] = hashlib.sha256(vocabulary).hexdigest()
    return json.loads(json.dumps(settings))


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _count_outcomes(work: pathlib.Path) -> int:
    """Return the number of outcomes in a file, after cutting off what a kill left of the next."""
    if not work.exists():
        return 0
    content = work.read_bytes()
    os.truncate(work, content.rfind(b"\n") + 1)
    return content.count(b"\n")


def _read(examples: Iterator[Example], pool: Workers[Example, Outcome]) -> Iterator[Outcome]:
    """Read examples in the worker processes, and yield their outcomes in order."""
    waiting: collections.deque[tuple[Example, Future[Outcome]]] = collections.deque()
    while True:
        for example in itertools.islice(examples, _AHEAD - len(waiting)):
            waiting.append((example, pool.submit(example)))
        if not waiting:
            return
        example, future = waiting.popleft()
        # Broad because no example may stop the others, whatever its files make a decoder do.
        try:
            yield future.result()
        except Exception as error:
            yield left_out(example, error)


def _outcomes(work: pathlib.Path) -> Iterator[Outcome]:
    with work.open("rb") as file:
        yield from map(_OUTCOME.validate_json, file)


def _records(work: pathlib.Path, kind: type) -> Iterator[Any]:
    return (each.record for each in _outcomes(work) if isinstance(each.record, kind))


def _store(folder: pathlib.Path, work: pathlib.Path) -> Summary:
    """Write the records and the examples that are left out, and return the counts."""
    sources = collections.defaultdict(collections.Counter[str])
    sizes: collections.Counter[tuple[int, int]] = collections.Counter()
    kinds: set[type] = set()
    lengths: list[int] = []
    listed = []
    for outcome in _outcomes(work):
        sources[outcome.source][outcome.reason or "kept"] += 1
        if outcome.record is None:
            listed.append(_OUTCOME.dump_json(outcome, include=_LISTED).decode() + "\n")
            continue
        kinds.add(type(outcome.record))
        if isinstance(outcome.record, Conversation):
            lengths.append(outcome.record.tokens)
        sizes.update({clip.path: (clip.height, clip.width) for clip in outcome.clips}.values())
    write_atomically(folder / LEFT_OUT, "".join(listed))
    if not kinds:
        # Otherwise the same ones would be left out again, after the files were mended.
        work.unlink()
        raise ValueError(
            f"{folder}: none of {len(listed)} rows can be used; see their reasons in "
            f"{folder / LEFT_OUT}, mend them, and prepare again"
        )
    names: dict[type, str] = {Question: "questions", Conversation: "conversations"}
    splits = {name: _records(work, kind) for kind, name in names.items() if kind in kinds}
    datasets.write_splits(folder / _RECORDS, splits)
    return Summary(
        sources={source: dict(reasons) for source, reasons in sources.items()},
        sizes=[list(size) for size, _ in sizes.most_common()],
        lengths=lengths,
    )
