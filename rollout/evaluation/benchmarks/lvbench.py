"""LVBench (`lmms-lab/LVBench`): a table, or the publisher's file with one video per line."""

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
)
from rollout.evaluation.benchmarks.tables import Row


def _rows(rows: list[Row]) -> list[Row]:
    """One row per question. The publisher's file has one per video, with its questions in `qa`."""
    found: list[Row] = []
    for row in rows:
        questions = row.get("qa")
        if not isinstance(questions, list) or not row.get("key"):
            found.append(row)
            continue
        for question in questions:
            if isinstance(question, dict):
                found.append({**question, "video_path": f"{row['key']}.mp4"})
            else:  # `_read` finds no question in it, so it counts as a broken row
                found.append(row)
    return found


def _read(row: Row) -> Item:
    text, options = split_options(text_of(row, "question"))
    if not options and row.get("options"):  # some copies have them in a column of their own
        options = plain_options(row["options"])
    question = choice(
        id=text_of(row, "uid"),
        video=text_of(row, "video_path"),
        text=text,
        options=options,
        answer=letter_answer(row, options),
    )
    types = row.get("question_type")
    if isinstance(types, list):
        return Item(question, tasks=tuple(str(type_) for type_ in types))
    return Item(question, tasks=optional_task(row, "question_type"))


LVBENCH = Benchmark(
    name="lvbench",
    title="LVBench",
    source="lmms-lab/LVBench",
    patterns=("*test-*.parquet", "*train-*.parquet", "*video_info.meta.jsonl"),
    fields=(
        "uid",
        "video_path",
        "question",
        "options",
        "answer",
        "question_type",
        "key",
        "qa",
    ),
    read=_read,
    rows=_rows,
)
