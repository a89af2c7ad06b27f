"""What the report shows of the central claim: tool gap and likelihood of tags."""

from __future__ import annotations

import random
from typing import Any

from paravt_extras.report.chart import Chart
from paravt_extras.report.claim import (
    budgets,
    claim_charts,
    gaps,
    weighted_mean,
)
from tests.train.test_report import lines

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


def test_a_step_without_a_gap_does_not_count_as_zero():
    steps = [step(1) | at_k(4, None, 0, 8), step(2) | at_k(4, 0.5, 4, 8), step(3)]
    assert weighted_mean([value for line in steps for value in gaps(line, 4)]) == 0.5
    assert weighted_mean(gaps(steps[0], 4)) is None
    assert budgets(steps) == [4]


def test_the_charts_have_a_line_per_budget_and_per_kind_of_tag():
    charts = charts_of(rl_steps())
    assert set(charts) == {"tool gap: reward", "tool gap: accuracy", "likelihood of tags"}
    assert charts["tool gap: reward"].legend == ["K = 4", "K = 64"]
    # No opening think was sampled: it was pinned.
    assert charts["likelihood of tags"].legend == ["</think>", "<tool_call>", "<answer>"]
    for line in lines(charts["likelihood of tags"]):
        assert line[0][1] > line[-1][1], "likelier at the end, and y grows downwards"
