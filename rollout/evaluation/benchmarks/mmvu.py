"""MMVU (`yale-nlp/MMVU`): the validation questions, multiple choice and open-ended."""

from __future__ import annotations

import re
from typing import Any

from paravt_jax.method.records import Question, QuestionKind
from rollout.evaluation.benchmarks.benchmark import Benchmark
from rollout.evaluation.benchmarks.items import (
    BrokenRow,
    Item,
    choice,
    letter_answer,
    optional,
    path_of,
    plain_options,
    text_of,
    without_unused,
)
from rollout.evaluation.benchmarks.tables import Row

_VIDEO = re.compile(r"(?:.*/)?(videos/[^/]+/[^/]+)")


def _read(row: Row) -> Item:
    found = _VIDEO.fullmatch(text_of(row, "video"))
    if not found:
        raise BrokenRow(f"video {row.get('video')!r}: not videos/<subject>/<n>.mp4")
    video = found[1]
    id = text_of(row, "id")
    text = text_of(row, "question")
    kind = text_of(row, "question_type")
    tasks = (_subject(row, video), kind)
    if kind == "open-ended":
        answer = text_of(row, "answer")
        question = Question(id, path_of(video), text, QuestionKind.OPEN_ENDED, answer)
        return Item(question, tasks=tasks)
    if kind == "multiple-choice":
        options = plain_options(_option_texts(row.get("choices")))
        question = choice(id, video, text, options, letter_answer(row, options))
        return Item(question, tasks=tasks)
    raise BrokenRow(f"question_type {kind!r}: neither multiple-choice nor open-ended")


def _subject(row: Row, video: str) -> str:
    """The subject, from its own column, from `metadata`, or from the folder of the video."""
    metadata = row.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {}
    return optional(row, "subject") or optional(metadata, "subject") or video.split("/")[1]


def _option_texts(choices: Any) -> list[Any] | None:
    """The options in a column {"A": text, "B": text, ...}. Unused letters have empty texts."""
    if not isinstance(choices, dict):
        return None
    return without_unused([choices.get(letter) for letter in "ABCDE"])


MMVU = Benchmark(
    name="mmvu",
    title="MMVU",
    source="yale-nlp/MMVU",
    patterns=("validation.json", "*validation-*.parquet"),
    fields=(
        "id",
        "video",
        "video_path",
        "question",
        "choices",
        "answer",
        "question_type",
        "subject",
        "metadata",
    ),
    read=_read,
)
