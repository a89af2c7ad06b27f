"""What the report shows first: greedy curves by K, and groups of questions."""

from __future__ import annotations

from typing import Any

import pytest

from paravt_extras.report.discovery import group_table, learning_curves
from tests.train.test_report import lines

KS = (4, 64)
Record = dict[str, Any]


def group(score: float, calls: float) -> Record:
    return {"score": score, "n": 9, "interval": [0, 1], "calls": calls, "parallel": 1.0}


def entry(k: int, score: float, calls: float, **changes: Any) -> Record:
    overview = "hidden" if k == 4 else "shown"
    groups = {"mcq": group(score, calls), f"mcq {overview}": group(score, calls)}
    setting = {"k": k, "dispatch": "parallel", "temperature": 0.0}
    figures = {"accuracy": score, "compliance": 1.0, "calls": calls, "turns": 1.0, "n": 9}
    return setting | figures | {"groups": groups} | changes


@pytest.fixture
def result() -> Record:
    return {
        "before": [*(entry(k, 0.2, 0.0) for k in KS), entry(4, 0.9, 1.0, temperature=0.7)],
        "curve": [entry(k, 0.5, 1.0, step=5) for k in KS],
        "after": [*(entry(k, 0.8, 2.0) for k in KS), entry(4, 0.1, 0.0, dispatch="none")],
    }


def test_curves_run_from_before_to_after(result):
    charts = {figure["title"]: figure["chart"] for figure in learning_curves(result, 10)}
    for title in ("accuracy", "crops per question", "accuracy, choice"):
        assert charts[title].legend == ["K = 4", "K = 64"]
    curves = lines(charts["accuracy"])
    assert [len(points) for points in curves] == [3, 3]
    assert curves[0][0][1] > curves[0][-1][1], "higher after RL, and y grows downwards"


def test_without_greedy_evaluations_there_are_no_curves(result):
    sampled = [entry(4, 0.2, 0.0, temperature=0.7)]
    assert learning_curves(result | {"before": sampled}, 10) == []
    assert learning_curves({}, 10) == []
    assert learning_curves(result, 0) == []
    assert len(learning_curves(result | {"curve": []}, 10)) == 6


def test_groups_of_questions_have_their_figures_side_by_side(result):
    table = dict(group_table(result))
    assert list(table) == ["choice, no frame shows the answer", "choice, a frame shows the answer"]
    [line] = table["choice, no frame shows the answer"]
    assert (line["k"], line["n"]) == (4, 9)
    assert [line[side]["score"] for side in ("before", "after")] == [0.2, 0.8]
    assert group_table({}) == []
