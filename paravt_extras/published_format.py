"""Writes questions and demonstrations as records of the published training data."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import pyarrow
import pyarrow.parquet

from paravt_jax.method.protocol import render_call
from paravt_jax.method.records import CropCall, Question, QuestionKind

_TEXT = pyarrow.string()
_RL_ROWS = pyarrow.schema(
    [
        ("prompt", pyarrow.list_(pyarrow.struct([("role", _TEXT), ("content", _TEXT)]))),
        ("videos", pyarrow.list_(pyarrow.struct([("video", _TEXT)]))),
        ("extra_info", _TEXT),
    ]
)
_SFT_ROWS = pyarrow.schema([("messages", _TEXT)])

SYSTEM = "You answer questions about videos."
SYSTEM_WITH_TOOL = (
    f"{SYSTEM} The tool crop_video shows a window of the video: give video_path, start_time and "
    "end_time in seconds."
)

Message = dict[str, Any]


def write_questions(file: pathlib.Path, records: Sequence[dict[str, Any]]) -> None:
    """Write records of `question_record` as a parquet file, which appears when it is complete."""
    _write(file, pyarrow.Table.from_pylist([*records], schema=_RL_ROWS))


def write_conversations(file: pathlib.Path, conversations: Sequence[list[Message]]) -> None:
    """Write conversations as a parquet file, which appears when it is complete."""
    records = [{"messages": json.dumps(each, ensure_ascii=False)} for each in conversations]
    _write(file, pyarrow.Table.from_pylist(records, schema=_SFT_ROWS))


def _write(file: pathlib.Path, table: pyarrow.Table) -> None:
    unfinished = file.with_suffix(".tmp")
    pyarrow.parquet.write_table(table, unfinished)
    os.replace(unfinished, file)


def question_record(question: Question) -> dict[str, Any]:
    """Return a record of a question. Published ones do not have the evidence."""
    # Published spans are lists of two times.
    span = question.kind is QuestionKind.TEMPORAL_GROUNDING
    extra: dict[str, Any] = {
        "answer": json.loads(question.answer) if span else question.answer,
        "question_type": question.kind.value,
    }
    if question.evidence is not None:
        extra["evidence"] = question.evidence
    text = with_options(question.text, question.options)
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"<video>{text}"},
        ],
        "videos": [{"video": question.video}],
        "extra_info": json.dumps(extra),
    }


def with_options(question: str, options: Sequence[str]) -> str:
    """Return a question with one line per option."""
    return "\n".join([question, *(f"{chr(ord('A') + n)}. {o}" for n, o in enumerate(options))])


def say(role: str, *content: str | Message) -> Message:
    """Return a message of texts and files."""
    entries = [{"type": "text", "text": c} if isinstance(c, str) else c for c in content]
    return {"role": role, "content": entries}


def show(video: str) -> Message:
    """Return the entry of a message that shows a video."""
    return {"type": "video_url", "video_url": {"url": video}}


def call(video: str, start: float, end: float) -> str:
    """Return a call of crop_video; times in seconds."""
    return render_call(CropCall(start, end), video)


def think(thought: str) -> str:
    return f"<think>\n{thought}\n</think>\n"


def conclude(thought: str, answer: Any) -> str:
    """Return a thought and the final answer."""
    return f"{think(thought)}<answer>{answer}</answer>"
