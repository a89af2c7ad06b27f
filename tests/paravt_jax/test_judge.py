"""The judge with a real server on this machine: its requests, replies and counts.

The talk itself - retries, waits, deadlines, keys - is the client's (`test_client.py`).
"""

import dataclasses
import json
import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paravt_jax.method.accuracy import token_f1
from paravt_jax.method.judge import JudgeSettings
from paravt_jax.method.records import Question, QuestionKind
from paravt_jax.remote.judge import RemoteJudge, read_score, request
from tests.paravt_jax.judge_server import Reply, says, serving

KEY = "sk-of-a-test-0123456789"
QUESTION = Question(
    "q", "v.mp4", "What does the dog do?", QuestionKind.OPEN_ENDED, "it runs to the red ball"
)
CLOSE = "the dog runs to a ball"  # F1 with the right answer is neither 0, 0.5 nor 1
F1 = token_f1(CLOSE, QUESTION.answer)
STALL = 60.0  # seconds: longer than any pause of a busy machine


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    """A key, and no proxy between the test and its server."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "*")


def quick(endpoint: str = "http://127.0.0.1:9/v1", **fields) -> JudgeSettings:
    values: dict[str, Any] = {"timeout": 20.0, **fields}
    return JudgeSettings(endpoint, model="judge-1", **values)


def counts(**some: int) -> dict[str, int]:
    return {"asked": 0, "answered": 0, "fell_back": 0} | some


# What is asked.


def test_what_needs_no_judge_is_scored_without_one():
    choice = dataclasses.replace(QUESTION, kind=QuestionKind.MULTIPLE_CHOICE, answer="B")
    grounding = dataclasses.replace(
        QUESTION, kind=QuestionKind.TEMPORAL_GROUNDING, answer="[0, 10]"
    )
    with serving(lambda *_: says("0.5")) as server:
        judge = RemoteJudge(quick(server.endpoint))
        items = [
            (QUESTION, "it runs to the red ball!"),
            (QUESTION, None),
            (choice, "B"),
            (choice, "C"),
            (grounding, "[0, 5]"),
        ]
        assert judge.scores(items) == [1.0, 0.0, 1.0, 0.0, 0.5]
        assert judge.scores([]) == []
        assert not server.received
        assert judge.counts == counts()


def test_the_request_asks_for_one_number():
    with serving(lambda *_: says("1")) as server:
        RemoteJudge(quick(server.endpoint)).scores([(QUESTION, CLOSE)])
        (received,) = server.received
    body = {name: received.body[name] for name in ("model", "temperature", "max_tokens")}
    assert body == {"model": "judge-1", "temperature": 0, "max_tokens": 16}
    assert [message["role"] for message in received.body["messages"]] == ["system", "user"]
    assert received.texts == {
        "question": QUESTION.text,
        "right_answer": QUESTION.answer,
        "given_answer": CLOSE,
    }


@settings(max_examples=40)
@given(st.text(max_size=60) | st.just("\ud83d"), st.integers(1, 40))
def test_an_answer_cannot_end_its_json_string(answer, repeats):
    content = request(quick(), QUESTION, repeats * answer)["messages"][1]["content"]
    assert content.encode()  # UTF-8 has no half of a surrogate pair
    assert json.loads(content) == {
        "question": QUESTION.text,
        "right_answer": QUESTION.answer,
        "given_answer": (repeats * answer)[:2000],
    }
    assert "<" not in content
    assert "[" not in content


# What it replies.


def test_a_score_is_read_from_a_reply_that_holds_nothing_else():
    for text in ("1", "1.0", "**Score:** 1", "`1`"):
        assert read_score(text) == 1.0, text
    for text in ("0.5", ".5", " 0.50\n", "Score: 0.5"):
        assert read_score(text) == 0.5, text
    for text in ("0", "grade = 0."):
        assert read_score(text) == 0.0, text
    for text in ("", "-1", "0.51", "1e0", "nan", "0.5 or 1", "0.5/1", "not 1", "１", "Score:"):
        assert read_score(text) is None, text


# How it fails.


def test_permanent_failures_fall_back_at_once_and_are_logged_once(caplog):
    with serving(lambda *_: Reply(f"the key {KEY} is bad".encode(), 401)) as server:
        judge = RemoteJudge(quick(server.endpoint))
        assert judge.scores([(QUESTION, CLOSE), (QUESTION, "a cat")]) == [F1, 0.0]
        assert judge.counts == counts(asked=2, fell_back=2)
        judge.scores([(QUESTION, CLOSE)])
        assert judge.counts == counts(asked=1, fell_back=1)
        (record,) = caplog.records
        assert server.endpoint in record.getMessage()
        assert "status 401; check the key: the key [the key] is bad" in record.getMessage()


def test_a_stalled_judge_delays_a_batch_by_its_time_limit_at_most(caplog):
    def answer(_, received):
        return says("0.5") if received.texts["given_answer"] == CLOSE else Reply(delay=STALL)

    with serving(answer) as server:
        judge = RemoteJudge(quick(server.endpoint, timeout=2 * STALL, time_limit=2, concurrency=2))
        start = time.monotonic()
        # One is answered, two stall, one never gets a place.
        assert (
            judge.scores([(QUESTION, CLOSE)] + [(QUESTION, f"a red cat {i}") for i in range(3)])[0]
            == 0.5
        )
        assert time.monotonic() - start < STALL
    assert judge.counts == counts(asked=4, answered=1, fell_back=3)
    assert "no score after time_limit = 2 s" in caplog.text


# Many at once.


def test_scores_are_in_the_order_of_answers_and_equal_answers_are_asked_once():
    wanted = {f"dog number {i}": score for i, score in enumerate([0, 0.5, 1, 1, 0.5, 0])}

    def answer(_, received):
        text = received.texts["given_answer"]
        return says(str(wanted[text]), delay=0.02 * (6 - int(text[-1])))  # the last is ready first

    answers = [*wanted, *reversed(wanted)]
    with serving(answer) as server:
        judge = RemoteJudge(quick(server.endpoint))
        assert judge.scores([(QUESTION, text) for text in answers]) == [
            wanted[text] for text in answers
        ]
        assert len(server.received) == judge.counts["asked"] == 6
        other = dataclasses.replace(QUESTION, id="r", text="What did the dog do?")
        judge.scores([(QUESTION, "dog number 1"), (other, "dog number 1")])
        assert judge.counts["asked"] == 2


OUTCOMES = [
    says("1"),
    says("0.5"),
    says("no"),
    Reply(status=500),
    Reply(close=True),
    Reply(delay=1),
]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from(OUTCOMES), min_size=1, max_size=4), st.sampled_from([0.2, 5.0]))
def test_counts_add_up(plans, time_limit):
    with serving(lambda _, received: plans[int(received.texts["given_answer"])]) as server:
        judge = RemoteJudge(quick(server.endpoint, attempts=1, timeout=0.15, time_limit=time_limit))
        scores = judge.scores([(QUESTION, str(i)) for i in range(len(plans))])
    asked, answered, fell_back = judge.counts.values()
    assert asked == len(plans) == answered + fell_back
    # The answers share no word with the right one, so the fallback F1 is 0.
    assert sum(score > 0 for score in scores) == answered


# The key, and what is refused.


@pytest.mark.parametrize(
    "field, value",
    [
        ("endpoint", f"http://user:{KEY}@localhost/v1"),
        ("model", " "),
        ("key_variable", KEY),
        ("timeout", 0.0),
        ("time_limit", math.nan),
        ("concurrency", 0),
    ],
)
def test_wrong_settings_are_refused(field, value):
    named = "address" if field == "endpoint" else rf"\.{field}: "
    with pytest.raises(ValueError, match=rf"judge.*{named}.*(?:give|leave)") as error:
        RemoteJudge(dataclasses.replace(quick(), **{field: value}))
    assert KEY not in str(error.value)
