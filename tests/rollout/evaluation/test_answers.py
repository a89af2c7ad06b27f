"""Answers as models write them over the seven splits, and further forms, as a person reads them.

`answers.jsonl` has one answer per line: its split and kind (`mcq`, `tvg`, `oe`), the options, the
right answer, the last turn of a response, and what a person reads in it: a letter, a span in
seconds, a text, or null if it names no option or span, or several. The readings were written down
before the reader saw the answers.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from paravt_jax.method.accuracy import (
    accuracy,
    chosen_option,
    is_read,
    normalise,
    open_answer,
    overlap,
    read_range,
)
from paravt_jax.method.records import Question, QuestionKind, Turn
from rollout.evaluation.split import final_text

ANSWERS: list[dict[str, Any]] = [
    json.loads(line)
    for line in pathlib.Path(__file__).with_name("answers.jsonl").read_text("utf-8").splitlines()
]

MISSES = {
    "lvbench-004": "a verdict beside each option, without a conclusion, counts as unread",
    "mlvu-031": "an option's words inside a sentence count as unread",
    "charades-142": "two events with a time each are read by a person only, so it counts as unread",
    "charades-184": "'frames 73 to 130': frame numbers are taken for seconds",
}
"""Answers that are read otherwise than by a person, with the reason."""


def question(record: dict[str, Any]) -> Question:
    kind = QuestionKind(record["kind"])
    options = tuple(record.get("options", ()))
    return Question(record["id"], "v.mp4", "Which?", kind, record["right"], options)


def reading(record: dict[str, Any]) -> Any:
    """What our reader makes of an answer, in the form of the table."""
    text = final_text([Turn(record["response"])])
    if text is None:
        return None
    if record["kind"] == "mcq":
        return chosen_option(text, record["options"])
    if record["kind"] == "tvg":
        span = read_range(text)
        return span and list(span)
    return open_answer(text)


def same(record: dict[str, Any], read: Any) -> bool:
    wanted = record["reading"]
    if isinstance(wanted, str) and isinstance(read, str):
        return normalise(wanted) == normalise(read)
    return wanted == read


def worth(record: dict[str, Any]) -> float:
    """The score that follows from a person's reading, for closed questions."""
    read, right = record["reading"], record["right"]
    if record["kind"] == "tvg":
        return overlap(tuple(read), tuple(json.loads(right))) if read else 0.0
    return float(read == right)


def test_every_answer_is_read_as_by_a_person():
    wrong = {
        record["id"]: (record["response"], record["reading"], reading(record))
        for record in ANSWERS
        if not same(record, reading(record))
    }
    assert set(wrong) == set(MISSES), wrong


@pytest.mark.parametrize("kind", ["mcq", "tvg"])
def test_every_answer_earns_what_its_reading_is_worth(kind):
    closed = [r for r in ANSWERS if r["kind"] == kind and r["id"] not in MISSES]
    assert closed
    for record in closed:
        text = final_text([Turn(record["response"])])
        earned = accuracy(question(record), text)
        assert earned == pytest.approx(worth(record)), record
        if text is not None:
            assert is_read(question(record), text) == (record["reading"] is not None), record


def test_two_answers_that_name_different_options_do_not_earn_more_than_one():
    """Each clear answer is joined with another one: at most one option is read, mostly none."""
    options = ANSWERS[0]["options"]
    clear = [r for r in ANSWERS if r.get("options") == options and r["reading"]]
    clear = [r for r in clear if len(r["response"]) < 40]
    read = 0
    pairs = [(a, b) for a in clear for b in clear if a["reading"] < b["reading"]]
    assert len(pairs) > 200
    for first, second in pairs:
        text = f"{first['response'].rstrip('.')} or {second['response']}"
        letter = chosen_option(text, options)
        assert letter in (None, first["reading"], second["reading"])
        read += letter is not None
    assert read < len(pairs) / 20
