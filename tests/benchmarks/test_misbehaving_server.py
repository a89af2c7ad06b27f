"""An evaluation against a server that misbehaves in every way that the benchmark knows."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.misbehaving_server import (
    FAULTS,
    REQUEST_SECONDS,
    asked_again,
    fault_of,
    misbehaving,
    problems,
    write_model,
    write_questions,
)
from paravt_jax.method.protocol import ProtocolSettings
from rollout.evaluation.folder import latest, read_lines
from rollout.evaluation.run import evaluate
from rollout.evaluation.settings import BenchmarkSettings

COUNT = 2 * len(FAULTS)


@pytest.fixture
def play(tmp_path, monkeypatch):
    """play(server) evaluates the questions with it; returns the summary."""
    monkeypatch.setenv("NO_PROXY", "*")
    write_questions(tmp_path / "questions.jsonl", COUNT)
    write_model(tmp_path / "model")

    def start(server):
        settings = BenchmarkSettings(
            str(tmp_path / "model"),
            questions=str(tmp_path / "questions.jsonl"),
            out=str(tmp_path / "out"),
            endpoint=server.endpoint,
            endpoint_model="m",
            request_seconds=REQUEST_SECONDS,
            episodes=COUNT,
            k=0,
            protocol=ProtocolSettings(pin_think=False),
        )
        return evaluate(settings)

    return start


@pytest.mark.slow
def test_every_question_has_an_outcome_and_none_is_asked_after_its_answer(play, tmp_path):
    """Questions are asked until they have an answer, unless the server refuses them."""
    assert len(FAULTS) > 20
    with misbehaving() as server:
        summary = play(server)
        redirected = sum(fault_of(number) == "redirect" for number in range(COUNT))
        refused = sum(bool(FAULTS[fault_of(number)].lasting) for number in range(COUNT))
        assert summary["left_out"]["failed"]["questions"] == redirected
        assert "307" in str(summary["left_out"]["failed"]["videos"])
        assert summary["left_out"]["refused"]["questions"] == refused
        assert summary["n"] == COUNT - redirected - refused
        first = len(server.asked)
        again = play(server)
        asked = server.asked[first:]
    assert "failed" not in again["left_out"]
    assert (again["n"], again["accuracy"]) == (COUNT - refused, 1.0)
    assert problems(latest(read_lines(tmp_path / "out")), COUNT) == []
    assert len(asked) == redirected + refused
    assert asked_again(server.asked) == []


def test_a_lost_or_wrong_outcome_is_a_problem():
    fine: dict[str, Any] = {"score": 1.0}
    lines = {str(number): fine for number in range(len(FAULTS))}
    for number, fault in enumerate(FAULTS.values()):
        if fault.lasting:
            lines[str(number)] = {"left_out": fault.lasting}
    assert problems(lines, len(FAULTS)) == []
    assert len(problems(lines | {"0": {"score": 0.0}}, len(FAULTS))) == 1
    assert len(problems(lines | {"1": {"left_out": "failed"}}, len(FAULTS))) == 1
    del lines["2"]
    assert len(problems(lines, len(FAULTS))) == 1
    assert asked_again([(1, False), (1, True), (2, True), (1, False)]) == [1]
