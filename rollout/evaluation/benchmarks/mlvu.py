"""MLVU (`sy1998/MLVU_dev`), multiple choice: a table, or the publisher's files, one per task."""

from __future__ import annotations

from paravt_jax.data.lettered import split_options
from rollout.evaluation.benchmarks.benchmark import Benchmark
from rollout.evaluation.benchmarks.items import (
    Item,
    choice,
    letter_answer,
    optional_task,
    plain_options,
    text_of,
    word_answer,
)
from rollout.evaluation.benchmarks.tables import Row


def _rows(rows: list[Row]) -> list[Row]:
    """Rename two columns of the publisher's files, so that they match the table."""
    names = {"video": "video_name", "question_type": "task_type"}
    return [{names.get(name, name): value for name, value in row.items()} for row in rows]


def _read(row: Row) -> Item:
    options = plain_options(row.get("candidates"))
    text, _ = split_options(text_of(row, "question"))  # some questions repeat the options
    video = text_of(row, "video_name")
    if text_of(row, "answer") in options:
        answer = word_answer(row, options)
    else:
        answer = letter_answer(row, options)
    question = choice(f"{video}/{text}", video, text, options, answer)
    return Item(question, tasks=optional_task(row, "task_type"))


MLVU = Benchmark(
    name="mlvu",
    title="MLVU",
    source="sy1998/MLVU_dev",
    patterns=("*test-*.parquet", "json/[1-7]_*.json", "*/json/[1-7]_*.json"),
    fields=(
        "video_name",
        "video",
        "question",
        "candidates",
        "answer",
        "task_type",
        "question_type",
    ),
    read=_read,
    rows=_rows,
)
