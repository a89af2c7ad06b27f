"""An evaluation against a server that misbehaves as servers and proxies do.

It answers each question only after one of the faults in `FAULTS`: errors with and without
Retry-After, proxies' pages, broken and endless bodies, closed connections, refusals.
"""

from __future__ import annotations

import dataclasses
import email.utils
import gzip
import json
import re
import time
from typing import Any

import pytest

from models.family import family
from models.weights.hf_config import to_hf
from paravt_jax.data import tokenizer_file
from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.world.vocabulary import build_vocabulary
from rollout.evaluation.folder import latest, read_lines
from rollout.evaluation.run import evaluate
from rollout.evaluation.settings import BenchmarkSettings
from tests.paravt_jax.judge_server import Received, Reply, says, serving

# Time limit of a request. Faults that stall take longer.
REQUEST_SECONDS = 2.0
_STALL = 2.5 * REQUEST_SECONDS
_PROXY_PAGE = b"<html><head><title>502</title></head><body><h1>Bad gateway</h1></body></html>"
_ANSWER = "I see it.\n</think>\n<answer>B</answer>"


ANSWER = says(_ANSWER)
_PROMISE = (("Content-Length", "99"),)
_IN_A_SECOND = email.utils.formatdate(time.time() + 1, usegmt=True)
# These contain the answer nevertheless.
ANSWERS = {
    "none": ANSWER,
    "extra end tokens": says(_ANSWER + "<|im_end|><|im_end|>\n<|im_start|>user\nC"),
    "gzip": Reply(gzip.compress(ANSWER.body), headers=(("Content-Encoding", "gzip"),)),
    "wrong content type": Reply(ANSWER.body, headers=(("Content-Type", "text/plain"),)),
}
# Questions get these every time, and stay without an answer.
REFUSED = {
    "content_filter": says("", "content_filter"),
    "400, context length": Reply(b"the context is too long", 400),
}
# The first command that asks leaves these questions out.
FAILED = {"redirect": Reply(status=307, headers=(("Location", "http://127.0.0.1:9/v1"),))}
FAULTS = {
    "429, Retry-After in seconds": Reply(b"busy", 429, (("Retry-After", "0.2"),)),
    "429, Retry-After as a date": Reply(b"busy", 429, (("Retry-After", _IN_A_SECOND),)),
    "408": Reply(b"too slow", 408),
    "502, a proxy's page": Reply(_PROXY_PAGE, 502),
    "504, no body": Reply(status=504),
    "a proxy's page with status 200": Reply(_PROXY_PAGE),
    "truncated JSON": Reply(ANSWER.body[:-20]),
    "half of the promised body": Reply(ANSWER.body[:9], 200, _PROMISE, close=True),
    "empty body": Reply(),
    "slow drip": Reply(ANSWER.body, drip=_STALL / 20),
    "no reply": Reply(close=True, delay=_STALL),
    "closed without a reply": Reply(close=True),
    "null content": says(None),
    "not finished": says("I", "abort"),
    "no choices": Reply(b'{"choices": []}'),
    "invalid UTF-8": Reply(ANSWER.body.replace(b"B", b"\xff\xfe")),
    "half of a surrogate pair": says("\ud83d" + _ANSWER),
}
ALL = [*ANSWERS, *REFUSED, *FAILED, *FAULTS]


class Course:
    """Shows question n the n-th fault, and answers it the next time.

    `asked` has the number of every question that was asked, and whether it got its answer then.
    """

    def __init__(self):
        self.asked: list[tuple[int, bool]] = []

    def __call__(self, _: int, received: Received) -> Reply:
        found = re.search(r"Question (\d+)\b", json.dumps(received.body["messages"]))
        assert found, received.body
        number = int(found[1])
        name = ALL[number % len(ALL)]
        again = name not in REFUSED and any(other == number for other, _ in self.asked)
        self.asked.append((number, again or name in ANSWERS))
        return ANSWER if again else (ANSWERS | REFUSED | FAILED | FAULTS)[name]


COUNT = 2 * len(ALL)


@pytest.fixture
def play(tmp_path, monkeypatch):
    """play(endpoint) evaluates the questions with a server; returns the summary."""
    monkeypatch.setenv("NO_PROXY", "*")
    # A request may take minutes otherwise.
    patient = BenchmarkSettings.server
    monkeypatch.setattr(
        BenchmarkSettings,
        "server",
        lambda settings: dataclasses.replace(patient(settings), timeout=REQUEST_SECONDS),
    )
    question = {"video": "none.mp4", "options": ["the first", "the second"], "answer": "B"}
    lines = [
        json.dumps({"id": str(number), "question": f"Question {number}: which one?"} | question)
        for number in range(COUNT)
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines), encoding="utf-8")
    tokenizer_file.save(build_vocabulary((), family().dialect), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(family().size("8b"))), encoding="utf-8")

    def run(endpoint: str) -> dict[str, Any]:
        settings = BenchmarkSettings(
            str(tmp_path),
            data=str(tmp_path / "questions.jsonl"),
            out=str(tmp_path / "out"),
            endpoint=(endpoint, "m"),
            episodes=COUNT,
            k=0,
            protocol=ProtocolSettings(pin_think=False),
        )
        return evaluate(settings)

    return run


@pytest.mark.slow
def test_every_question_has_an_outcome_and_none_is_asked_after_its_answer(play, tmp_path):
    """Questions are asked until they have an answer, unless the server refuses them."""
    course = Course()
    with serving(course) as server:
        summary = play(server.endpoint)
        failures = [(one["left_out"], one["reason"]) for one in summary["left_out"]]
        failed, refused = 2 * len(FAILED), 2 * len(REFUSED)
        assert [cause for cause, _ in failures].count("failed") == failed == len(failures) - refused
        assert ("refused", "status 400: the context is too long") in failures
        assert summary["n"] == COUNT - failed - refused
        first = len(course.asked)
        again = play(server.endpoint)
    assert len(course.asked) - first == failed + refused
    assert len(again["left_out"]) == refused
    assert (again["n"], again["accuracy"]) == (COUNT - refused, 1.0)
    for line in latest(read_lines(tmp_path / "out")).values():
        lasting = ALL[int(line["id"]) % len(ALL)] in REFUSED
        assert line.get("left_out") == ("refused" if lasting else None), line
    answered = [number for number, answers in course.asked if answers]
    assert len(answered) == len(set(answered)), "a question was asked again after its answer"
