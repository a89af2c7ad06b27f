"""LongVideoBench: `longvideobench/LongVideoBench`, its validation table or lvb_val.json."""

from __future__ import annotations

from rollout.evaluation.benchmarks.benchmark import Benchmark
from rollout.evaluation.benchmarks.items import (
    Item,
    choice,
    index_answer,
    optional,
    plain_options,
    text_of,
)
from rollout.evaluation.benchmarks.tables import Row


def _read(row: Row) -> Item:
    words = row.get("candidates") or [row.get(f"option{i}") for i in range(5)]
    words = [word for word in words if word is not None and word != "N/A"]  # the unused come last
    options = plain_options(words)
    question = choice(
        text_of(row, "id"), f"videos/{text_of(row, 'video_path')}", text_of(row, "question"), options,
        index_answer(row, options, "correct_choice"),
    )  # fmt: skip
    return Item(
        question,
        optional(row, "duration_group"),
        tuple(filter(None, (optional(row, "question_category"),))),
    )


LONGVIDEOBENCH = Benchmark(
    name="longvideobench",
    title="LongVideoBench",
    source="longvideobench/LongVideoBench",
    patterns=("*validation-*.parquet", "lvb_val.json"),
    fields=(
        "id",
        "video_path",
        "question",
        *(f"option{i}" for i in range(5)),
        "candidates",
        "correct_choice",
        "duration_group",
        "question_category",
    ),
    read=_read,
    paper={"ParaVT-8B": 60.4, "Qwen3-VL-8B": 52.2, "LongVT-RFT-7B": 54.7},
)
