"""What the report shows of the central claim: tool gap, likelihood of tags, format."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from paravt_extras.report.chart import Chart
from paravt_extras.report.claim import (
    budgets,
    claim_charts,
    format_table,
    gaps,
    tag_probabilities,
    weighted_mean,
)
from tests.train.test_report import lines, page_of, write_lines

Record = dict[str, Any]


def step(number: int, **figures: float | None) -> Record:
    """A line of metrics.jsonl; underscores in names stand for slashes after the group."""
    names = {name.replace("__", "/"): value for name, value in figures.items()}
    return {"phase": "rl", "step": number, "wall": 0.0} | names


def at_k(k: int, gap: float | None, called: float, rollouts: float) -> Record:
    figures: Record = {f"k{k}/rollouts": rollouts, f"k{k}/rollouts_with_calls": called}
    return figures if gap is None else figures | {f"k{k}/tool_gap": gap}


def charts_of(steps: list[Record]) -> dict[str, Chart]:
    return {figure["title"]: figure["chart"] for figure in claim_charts(steps)}


def rl_steps(count: int = 48) -> list[Record]:
    """The gap closes at K = 64 and stays at K = 4; tags become certain."""
    rng = random.Random(0)
    steps = []
    for n in range(1, count + 1):
        share = n / count
        line = step(n) | at_k(4, 0.5 + rng.gauss(0, 0.1), 6, 8)
        line |= at_k(64, 0.4 * (1 - share) + rng.gauss(0, 0.1), 4, 16)
        line |= {"k4/tool_gap_accuracy": 0.5, "k64/tool_gap_accuracy": 0.1}
        line |= {"tags/probability": 0.5 + share / 2, "tags/count": 40, "tags/logprob": -0.2}
        for kind, start in (("think_close", 0.3), ("call_open", 0.6), ("answer_open", 0.8)):
            line |= {f"tags/{kind}/probability": start + (1 - start) * share}
            line |= {f"tags/{kind}/count": 12}
        steps.append(line | {"tags/think_open/count": 0.0})
    return steps


def at_temperatures() -> Record:
    """A result at two K, of which the second has three times as many rollouts."""
    result: Record = {}
    for side, lift in (("before", 0.0), ("after", 0.4)):
        for k, n in ((4, 50), (64, 150)):
            for temperature in (0.0, 0.3, 0.7, 1.0):
                figures = {"compliance": 0.5 - 0.2 * temperature + lift, "format_reward": 0.5}
                figures["format_reward"] += lift if k == 64 else 0.0
                setting = {"k": k, "dispatch": "parallel", "temperature": temperature, "n": n}
                result.setdefault(side, []).append(setting | figures)
    return result


def test_a_step_without_a_gap_does_not_count_as_zero():
    steps = [step(1) | at_k(4, None, 0, 8), step(2) | at_k(4, 0.5, 4, 8), step(3)]
    assert weighted_mean([value for line in steps for value in gaps(line, 4)]) == 0.5
    assert weighted_mean(gaps(steps[0], 4)) is None
    assert budgets(steps) == [4]


def test_tags_weigh_by_their_number_and_a_kind_without_tags_has_no_mean():
    steps = [
        step(1, tags__probability=0.2, tags__count=30.0),
        step(2, tags__probability=0.8, tags__count=10.0),
        step(3, tags__count=0.0),
    ]
    assert weighted_mean([value for line in steps for value in tag_probabilities(line)]) == (
        pytest.approx((0.2 * 30 + 0.8 * 10) / 40)
    )
    assert tag_probabilities(steps[0], "think_open") == []


def test_the_charts_have_a_line_per_budget_and_per_kind_of_tag():
    charts = charts_of(rl_steps())
    assert set(charts) == {"tool gap: reward", "tool gap: accuracy", "likelihood of tags"}
    assert charts["tool gap: reward"].legend == ["K = 4", "K = 64"]
    # No opening think was sampled: it was pinned.
    assert charts["likelihood of tags"].legend == ["</think>", "<tool_call>", "<answer>"]
    for line in lines(charts["likelihood of tags"]):
        assert line[0][1] > line[-1][1], "likelier at the end, and y grows downwards"


def test_format_is_the_mean_over_all_rollouts_of_a_temperature():
    table = format_table(at_temperatures())
    assert [line["temperature"] for line in table] == [0.0, 0.3, 0.7, 1.0]
    hot = table[-1]
    assert hot["before"]["compliance"] == pytest.approx(0.3)
    assert hot["after"]["compliance"] == pytest.approx(0.7)
    # Rollouts at K = 64 are three quarters of all.
    assert hot["after"]["format_reward"] == pytest.approx(0.25 * 0.5 + 0.75 * 0.9)
    assert hot["before"]["n"] == hot["after"]["n"] == 200
    assert format_table(at_temperatures() | {"after": []})[0]["after"] == {}


def test_the_page_shows_all_three_measures(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", rl_steps())
    rows = {
        side: [line | {"accuracy": 0.5, "calls": 1.0, "turns": 1.0} for line in lines]
        for side, lines in at_temperatures().items()
    }
    (tmp_path / "result.json").write_text(json.dumps(rows))
    page = page_of(tmp_path)
    names = [e["text"] for e in page.all("span", "name")]
    assert names[-3:] == ["tool gap: reward", "tool gap: accuracy", "likelihood of tags"]
    rows = [e["text"] for e in page.all("tr")]
    assert "greedy0.50 → 0.900.50 → 0.80200" in rows
    assert "10.30 → 0.700.50 → 0.80200" in rows
