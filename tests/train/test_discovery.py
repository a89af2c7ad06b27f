"""What the report shows first: greedy curves by K, groups, and a question twice."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from paravt_extras.report.discovery import choose_pairs, group_table, learning_curves
from tests.train.test_report import Page, fake_episode, fake_video, lines, page_of, write_lines

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


def episodes(tmp_path, *changes: Record) -> list[Record]:
    at = fake_video(tmp_path / "videos/v.mp4")
    entries = []
    for change in changes:
        entries.append(
            fake_episode(random.Random(1), "after", 0, 0, "videos/v.mp4", at, 4)
            | {"temperature": 0.0}
            | change
        )
    return entries


GUESS = {"phase": "before", "turns": [{"tokens": [], "calls": []}], "rewards": {"accuracy": 0.0}}


def test_a_pair_is_a_guess_and_then_crops_side_by_side(tmp_path):
    old, new = episodes(tmp_path, GUESS, {})
    assert choose_pairs([new, old]) == [(old, new)]
    one_call = [{"tokens": [], "calls": turn["calls"][:1]} for turn in new["turns"]]
    refused = [
        {"tokens": [], "calls": [call | {"status": "bad_window"} for call in turn["calls"]]}
        for turn in new["turns"]
    ]
    for other in (
        [old],
        [new],
        [old, new | {"temperature": 0.7}],
        [old, new | {"k": 16}],
        [old, new | {"rewards": {"accuracy": 0.5}}],
        [old, new | {"turns": one_call}],
        [old | {"rewards": {"accuracy": 1.0}}, new],
        [old | {"turns": new["turns"]}, new],
        [old, new | {"turns": []}],
        [old, new | {"turns": refused}],
    ):
        assert choose_pairs(other) == []


def test_the_page_begins_with_curves_groups_and_a_pair(result, tmp_path):
    write_lines(tmp_path / "episodes.jsonl", episodes(tmp_path, GUESS, {}))
    step = {"phase": "rl", "step": 10, "wall": 0.0, "loss": 0.1}
    write_lines(tmp_path / "metrics.jsonl", [step])
    (tmp_path / "result.json").write_text(json.dumps(result))
    page: Page = page_of(tmp_path)
    [pair] = page.all("div", "pair")
    assert pair["text"].index("✗ wrong") < pair["text"].index("✓ right")
