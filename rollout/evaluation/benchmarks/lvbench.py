"""LVBench: `lmms-lab/LVBench`, a table, or the set's own lines with one video each."""

from __future__ import annotations

from rollout.evaluation.benchmarks.benchmark import Benchmark
from rollout.evaluation.benchmarks.items import (
    Item,
    choice,
    letter_answer,
    split_options,
    text_of,
)
from rollout.evaluation.benchmarks.tables import Row


def _rows(rows: list[Row]) -> list[Row]:
    """One row a question: the set's own file has one row a video, with its questions inside."""
    return [
        {**question, "video_path": f"{row['key']}.mp4"} if isinstance(question, dict) else row
        for row in rows
        for question in (
            row["qa"] if isinstance(row.get("qa"), list) and row.get("key") else [None]
        )
    ]


def _read(row: Row) -> Item:
    text, options = split_options(text_of(row, "question"))
    question = choice(
        text_of(row, "uid"), text_of(row, "video_path"), text, options, letter_answer(row, options)
    )
    kinds = row.get("question_type")
    return Item(
        question,
        "",
        tuple(str(kind) for kind in kinds)
        if isinstance(kinds, list)
        else tuple(filter(None, (kinds,))),
    )


LVBENCH = Benchmark(
    name="lvbench",
    title="LVBench",
    source="lmms-lab/LVBench",
    patterns=("*test-*.parquet", "*train-*.parquet", "*video_info.meta.jsonl"),
    fields=("uid", "video_path", "question", "answer", "question_type", "key", "qa"),
    read=_read,
    rows=_rows,
    paper={"ParaVT-8B": 39.8, "Qwen3-VL-8B": 33.1, "LongVT-RFT-7B": 37.9},
)
