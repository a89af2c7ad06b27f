"""LongVideoBench (`longvideobench/LongVideoBench`): the validation table, or lvb_val.json."""

from __future__ import annotations

from rollout.evaluation.benchmarks.benchmark import Benchmark
from rollout.evaluation.benchmarks.items import (
    Item,
    choice,
    index_answer,
    optional,
    optional_task,
    plain_options,
    text_of,
    without_unused,
)
from rollout.evaluation.benchmarks.tables import Row

_OPTIONS = tuple(f"option{i}" for i in range(5))


def _read(row: Row) -> Item:
    candidates = row.get("candidates") or [row.get(name) for name in _OPTIONS]
    options = plain_options(without_unused(candidates))
    question = choice(
        id=text_of(row, "id"),
        video=f"videos/{text_of(row, 'video_path')}",
        text=text_of(row, "question"),
        options=options,
        answer=index_answer(row, options, "correct_choice"),
    )
    return Item(
        question,
        duration=optional(row, "duration_group"),
        tasks=optional_task(row, "question_category"),
    )


LONGVIDEOBENCH = Benchmark(
    name="longvideobench",
    title="LongVideoBench",
    source="longvideobench/LongVideoBench",
    patterns=("*validation-*.parquet", "lvb_val.json"),
    media=("videos.tar*",),
    fields=(
        "id",
        "video_path",
        "question",
        *_OPTIONS,
        "candidates",
        "correct_choice",
        "duration_group",
        "question_category",
    ),
    read=_read,
)
