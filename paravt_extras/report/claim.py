"""Whether calls pay and whether the format holds: the paper's central claim, in figures.

Two measures of a run's metrics (docs/method.md explains them):

    tool gap            what rollouts that call earn more than rollouts that do not, by K
    likelihood of tags  how sure the policy is of the tags that it samples
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paravt_extras.report.chart import Point, lines_chart
from paravt_jax.method.structure import KIND_OF_TAG

Record = dict[str, Any]
Weighted = tuple[float, float]
"""A value, and its weight in a mean."""

KINDS = {kind.name.lower(): tag.decode() for tag, kind in KIND_OF_TAG.items()}
"""The kinds of tags as metrics name them, and the tags."""
# A chart has at most this many points. Each is the mean over a window of steps.
POINTS = 60
_BUDGET = re.compile(r"k(\d+)/rollouts_with_calls")


def is_shown(key: str) -> bool:
    """Return whether this metric is part of the charts here, and so needs none of its own."""
    return key.startswith("tags/") or bool(
        re.fullmatch(r"k\d+/(tool_gap|tool_gap_accuracy|rollouts_with_calls|rollouts)", key)
    )


def budgets(steps: Sequence[Record]) -> list[int]:
    """Return the overview budgets K of the rollouts of some RL steps."""
    return sorted({int(m[1]) for step in steps for key in step if (m := _BUDGET.fullmatch(key))})


def gaps(step: Record, k: int, figure: str = "tool_gap") -> list[Weighted]:
    """Return the tool gap of a step at K; [] if no rollout called there, or all did.

    Its weight is n * m / (n + m) for n rollouts with calls and m without, the inverse of the
    variance of a difference of two means: a step in which one rollout called says little.

    Args:
        step: A step's line of metrics.jsonl.
        k: The overview budget.
        figure: `tool_gap`, of the reward, or `tool_gap_accuracy`.
    """
    gap = step.get(f"k{k}/{figure}")
    if gap is None:
        return []
    rollouts, called = step[f"k{k}/rollouts"], step[f"k{k}/rollouts_with_calls"]
    return [(gap, called * (rollouts - called) / rollouts)]


def tag_probabilities(step: Record, kind: str) -> list[Weighted]:
    """Return the mean probability of a step's sampled tags, weighted by their number; [] without
    any.

    Args:
        step: A step's line of metrics.jsonl.
        kind: A key of `KINDS`.
    """
    probability = step.get(f"tags/{kind}/probability")
    return [] if probability is None else [(probability, step[f"tags/{kind}/count"])]


def weighted_mean(values: Sequence[Weighted]) -> float | None:
    """Return the weighted mean; None if there is no value."""
    total = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / total if total else None


def claim_charts(steps: Sequence[Record]) -> list[Record]:
    """Return the charts of the tool gap by K and of the likelihood of tags over the steps of RL.

    Args:
        steps: The lines of metrics.jsonl of RL. Those of runs without these measures are skipped.
    """
    charts = []
    note = "of rollouts with calls, minus those without"
    for figure, title in (("tool_gap", "reward"), ("tool_gap_accuracy", "accuracy")):
        lines = {
            f"K = {k}": _over_steps(steps, lambda step, k=k, figure=figure: gaps(step, k, figure))
            for k in budgets(steps)
        }
        charts += _chart(f"tool gap: {title}", note, lines, -0.5, 0.5)
    tags = {
        title: _over_steps(steps, lambda step, kind=kind: tag_probabilities(step, kind))
        for kind, title in KINDS.items()
    }
    return charts + _chart("likelihood of tags", "mean probability where sampled", tags, 0.0, 1.0)


def _over_steps(steps: Sequence[Record], values: Callable[[Record], list[Weighted]]) -> list[Point]:
    """Return moving means over a twelfth of the steps to each side."""
    span = max(1, len(steps) // 12)
    points = []
    # Evenly spread, from the first step to the last.
    for i in np.linspace(0, len(steps) - 1, min(POINTS, len(steps)), dtype=int):
        window = steps[max(0, i - span) : i + span + 1]
        near = [value for step in window for value in values(step)]
        points.append((steps[i]["step"], weighted_mean(near)))
    return points


def _chart(
    title: str, note: str, lines: dict[str, list[Point]], low: float, high: float
) -> list[Record]:
    """Return a chart of the lines that have values; [] if none has."""
    known = [(name, line) for name, line in lines.items() if any(y is not None for _, y in line)]
    if not known:
        return []
    return [{"title": title, "note": note, "chart": lines_chart(known, low, high)}]
