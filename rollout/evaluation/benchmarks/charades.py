"""Charades-STA (`lmms-lab/charades_sta`): temporal grounding."""

from __future__ import annotations

from paravt_jax.method.records import Question, QuestionKind
from rollout.evaluation.benchmarks.benchmark import Benchmark
from rollout.evaluation.benchmarks.items import (
    Item,
    path_of,
    span_answer,
    text_of,
)
from rollout.evaluation.benchmarks.tables import Row


def _read(row: Row) -> Item:
    video = text_of(row, "video")
    caption = text_of(row, "caption")
    span = span_answer(row, "timestamp")
    question = Question(
        id=f"{video}/{span}/{caption}",
        video=path_of(f"Charades_v1_480/{video}"),
        text=f"When does this happen in the video: {caption.rstrip('.')}?",
        kind=QuestionKind.TEMPORAL_GROUNDING,
        answer=span,
    )
    return Item(question)


CHARADES = Benchmark(
    name="charades",
    title="Charades-STA mIoU",
    source="lmms-lab/charades_sta",
    patterns=("*test-*.parquet",),
    media=(),
    elsewhere="Charades_v1_480.zip of https://prior.allenai.org/projects/charades",
    fields=("video", "caption", "timestamp"),
    read=_read,
    score="miou",
)
