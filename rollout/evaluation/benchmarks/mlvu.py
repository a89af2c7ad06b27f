"""MLVU, multiple choice: `sy1998/MLVU_dev`, a table, or the set's own files, one per task."""

from __future__ import annotations

from rollout.evaluation.benchmarks.benchmark import Benchmark
from rollout.evaluation.benchmarks.items import (
    Item,
    choice,
    letter_answer,
    optional,
    plain_options,
    split_options,
    text_of,
    word_answer,
)
from rollout.evaluation.benchmarks.tables import Row


def _rows(rows: list[Row]) -> list[Row]:
    """The columns of the collected table: the set's own files, one a task, name two of them otherwise."""
    own = {"video": "video_name", "question_type": "task_type"}
    return [{own.get(name, name): value for name, value in row.items()} for row in rows]


def _read(row: Row) -> Item:
    options, text = plain_options(row.get("candidates")), text_of(row, "question")
    text, _ = split_options(text)  # some copies repeat the options in the question
    video = text_of(row, "video_name")
    answer = (
        word_answer(row, options)
        if text_of(row, "answer") in options
        else letter_answer(row, options)
    )
    return Item(
        choice(f"{video}/{text}", video, text, options, answer),
        "",
        tuple(filter(None, (optional(row, "task_type"),))),
    )


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
    paper={"ParaVT-8B": 65.0, "Qwen3-VL-8B": 58.3, "LongVT-RFT-7B": 59.4},
)
