"""Video-MME (`lmms-lab/Video-MME`): two splits of one table, without and with subtitles."""

from __future__ import annotations

import dataclasses

from rollout.evaluation.benchmarks.benchmark import Benchmark
from rollout.evaluation.benchmarks.items import (
    Item,
    choice,
    letter_answer,
    optional,
    optional_task,
    path_of,
    plain_options,
    text_of,
)
from rollout.evaluation.benchmarks.tables import Row

_FILES = ("videomme/test-*.parquet", "*test-*.parquet")
_MEDIA = ("videos_chunked_*.zip", "subtitle.zip")
_FIELDS = (
    "videoID",
    "question_id",
    "question",
    "options",
    "answer",
    "duration",
    "task_type",
    "domain",
    "sub_category",
)


def _read(row: Row) -> Item:
    video = text_of(row, "videoID")
    text = text_of(row, "question")
    options = plain_options(row.get("options"))
    question = choice(
        id=optional(row, "question_id") or f"{video}/{text}",
        video=f"data/{video}.mp4",
        text=text,
        options=options,
        answer=letter_answer(row, options),
    )
    return Item(
        question,
        duration=optional(row, "duration"),
        tasks=optional_task(row, "task_type"),
    )


def _read_with_subtitles(row: Row) -> Item:
    subtitles = path_of(f"subtitle/{text_of(row, 'videoID')}.srt")
    return dataclasses.replace(_read(row), subtitles=subtitles)


VIDEOMME = Benchmark(
    name="videomme",
    title="VideoMME w/o",
    source="lmms-lab/Video-MME",
    patterns=_FILES,
    media=_MEDIA,
    fields=_FIELDS,
    read=_read,
)

VIDEOMME_WITH_SUBTITLES = Benchmark(
    name="videomme_wsub",
    title="VideoMME w/ sub",
    source="lmms-lab/Video-MME",
    patterns=_FILES,
    media=_MEDIA,
    fields=_FIELDS,
    read=_read_with_subtitles,
)
