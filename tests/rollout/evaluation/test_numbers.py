"""Summaries agree with the lines that they are made of."""

from __future__ import annotations

import pytest

from rollout.evaluation.summary import MOST_VALUES, has_failed, report, summarise
from tests.rollout.evaluation.finished import config, left_out, line


def test_a_summary_has_the_figures_of_its_lines():
    lines = [
        line("a", 1.0, "v1", calls=0),
        line("b", 0.0, "v2", duration="long", tasks=["t", "u"], calls=3),
        left_out("c", "gone"),
        left_out("d", "gone"),
        left_out("e", "bad", "unreadable"),
        line("b2", 0.5, "v3", read=None, compliant=False, stop="no_answer", tasks=[], spent=5.0),
    ]
    broken = {"7": "answer is missing"}
    summary = summarise(config(), lines, 9, broken)
    assert (summary["accuracy"], summary["n"], summary["questions"]) == (0.5, 3, 9)
    low, high = summary["interval"]
    assert 0 < low < 0.5 < high < 1
    assert summary["calls"] == pytest.approx(4 / 3)
    assert summary["seconds_per_question"] == 3.0
    assert summary["compliance"] == pytest.approx(2 / 3)
    assert summary["stops"] == {"answered": 2, "no_answer": 1}
    groups = {
        name: {group: (v["score"], v["n"]) for group, v in summary[name].items()}
        for name in ("by_duration", "by_task")
    }
    assert groups["by_duration"] == {"long": (0.0, 1), "short": (0.75, 2)}
    assert groups["by_task"] == {"t": (0.5, 2), "u": (0.0, 1)}
    missing = {"video": "gone", "left_out": "missing", "reason": "no file"}
    # Each with its reason, though two are about one video.
    assert summary["left_out"][:2] == [{"id": id} | missing for id in ("c", "d")]
    assert summary["left_out"][2]["left_out"] == "unreadable"
    assert summary["broken_records"] == broken
    assert has_failed(summary) and not has_failed(summary | {"n": 27})
    assert "miou" not in summary
    reordered = [*lines[4:], *lines[:4]]
    assert summary == summarise(config(), reordered, 9, broken)


def test_grounding_has_overlap_and_recall():
    lines = [line("a", 0.3), line("b", 0.69), line("c", 0.7), line("d", 0.1)]
    summary = summarise(config("charades"), lines, 4, {})
    assert summary["miou"] == pytest.approx(0.4475)
    assert "accuracy" not in summary
    assert (summary["r@0.3"], summary["r@0.5"], summary["r@0.7"]) == (0.75, 0.5, 0.25)


def test_kinds_are_not_averaged(tmp_path):
    lines = [line("a", 1.0), line("b", 0.5, kind="tvg", read=None), line("c", 0.1, kind="oe")]
    mixed = summarise(config(), [one | {"columns": {"level": "easy"}} for one in lines], 3, {})
    for figures, mean in ((mixed, 1.0), (mixed["grounding"], 0.5), (mixed["open_ended"], 0.1)):
        assert figures["by_column"]["level: easy"]["score"] == mean
    assert (mixed["accuracy"], mixed["without_answer"]) == (1.0, 0)
    assert (mixed["grounding"]["score"], mixed["open_ended"]["score"]) == (0.5, 0.1)
    assert (mixed["by_task"]["t"]["score"], mixed["by_duration"]["short"]["n"]) == (1.0, 1)
    score, grounding, opened = list(report(mixed, tmp_path))[:3]
    assert score.endswith("on 1 of 3 questions")
    assert "grounding: 50.0" in grounding and "open-ended: 10.0" in opened
    alone = summarise(config(), lines[1:], 2, {})
    assert alone["accuracy"] == 0.5
    assert "grounding" not in alone


def test_figures_are_given_by_columns_with_few_values():
    for values in (MOST_VALUES, MOST_VALUES + 1):
        lines = [line(str(n), float(n % 2), columns={"of": str(n)}) for n in range(values)]
        groups = summarise(config(), lines, values, {})["by_column"]
        expected = {f"of: {n}": n % 2 for n in range(values) if values == MOST_VALUES}
        assert {name: group["score"] for name, group in groups.items()} == expected
