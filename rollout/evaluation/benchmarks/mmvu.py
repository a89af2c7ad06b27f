"""MMVU's validation questions, multiple choice and open-ended: `yale-nlp/MMVU`."""

from __future__ import annotations

import re

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
)
from rollout.evaluation.benchmarks.tables import Row

_VIDEO = re.compile(r"(?:.*/)?(videos/[^/]+/[^/]+)")


def _read(row: Row) -> Item:
    found = _VIDEO.fullmatch(text_of(row, "video"))
    if not found:
        raise BrokenRow(f"video {row.get('video')!r} is no address of videos/<subject>/<n>.mp4")
    id, text, kind = text_of(row, "id"), text_of(row, "question"), text_of(row, "question_type")
    details = row.get("metadata")
    subject = (
        optional(row, "subject")
        or optional(details if isinstance(details, dict) else {}, "subject")
        or found[1].split("/")[1]
    )
    if kind == "open-ended":
        return Item(
            Question(id, path_of(found[1]), text, QuestionKind.OPEN_ENDED, text_of(row, "answer")),
            "",
            (subject, kind),
        )
    if kind != "multiple-choice":
        raise BrokenRow(f"question_type {kind!r} is neither multiple-choice nor open-ended")
    choices = row.get("choices")
    words = (
        [choices[letter] for letter in "ABCDE" if choices.get(letter)]
        if isinstance(choices, dict)
        else None
    )
    options = plain_options(words)
    return Item(
        choice(id, found[1], text, options, letter_answer(row, options)), "", (subject, kind)
    )


MMVU = Benchmark(
    name="mmvu",
    title="MMVU",
    source="yale-nlp/MMVU",
    patterns=("validation.json", "*validation-*.parquet"),
    fields=(
        "id",
        "video",
        "question",
        "choices",
        "answer",
        "question_type",
        "subject",
        "metadata",
    ),
    read=_read,
    paper={"ParaVT-8B": 68.6, "Qwen3-VL-8B": 68.0, "LongVT-RFT-7B": 63.4},
)
