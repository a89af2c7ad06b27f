"""What was learned: the first part of a run's report.

Greedy accuracy and calls by K over the steps of RL, and the same figures for choice and grounding
separately, and by whether an overview frame shows the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paravt_extras.report.chart import Chart, lines_chart

Record = dict[str, Any]
GROUPS = {
    "mcq hidden": "choice, no frame shows the answer",
    "mcq shown": "choice, a frame shows the answer",
    "tvg hidden": "grounding, no frame lies in the span",
    "tvg shown": "grounding, a frame lies in the span",
}
"""Titles of the groups of `rollout.evaluation.figures.summarise_setting`."""


def greedy(lines: Sequence[Record]) -> list[Record]:
    """Return the lines of greedy decoding with parallel dispatch, in the order of K."""
    matches = [
        line for line in lines if line["temperature"] == 0 and line["dispatch"] == "parallel"
    ]
    return sorted(matches, key=lambda line: line["k"])


def of_group(name: str, key: str) -> Callable[[Record], float | None]:
    """Return a function from a line to a figure of a group; None if the line has no such group."""
    return lambda line: line.get("groups", {}).get(name, {}).get(key)


def learning_curves(result: Record, last_step: int) -> list[Record]:
    """Return the charts of greedy evaluations over RL steps, with a line per K; [] if there are too
    few.

    Args:
        result: Contents of result.json.
        last_step: Number of RL steps so far.
    """
    before = [{"step": 0} | line for line in greedy(result.get("before", []))]
    after = [{"step": last_step} | line for line in greedy(result.get("after", []))]
    evaluated = [*before, *result.get("curve", []), *after]
    if not before or evaluated[-1]["step"] == 0:
        return []

    def chart(value: Callable[[Record], float | None], high: float) -> Chart:
        lines = [
            (f"K = {k}", [(line["step"], value(line)) for line in evaluated if line["k"] == k])
            for k in dict.fromkeys(line["k"] for line in before)
        ]
        return lines_chart(lines, 0.0, high)

    charts = [
        ("accuracy", "all questions", lambda line: line["accuracy"], 1.0),
        ("accuracy, choice", "", of_group("mcq", "score"), 1.0),
        ("accuracy, grounding", "mean overlap (IoU)", of_group("tvg", "score"), 1.0),
        ("crops per question", "all questions", lambda line: line["calls"], 2.0),
        ("crops, choice", "", of_group("mcq", "calls"), 2.0),
        ("crops, grounding", "", of_group("tvg", "calls"), 2.0),
    ]
    return [
        {"title": title, "note": note, "chart": chart(value, high)}
        for title, note, value, high in charts
    ]


def group_table(result: Record) -> list[tuple[str, list[Record]]]:
    """Return (title, lines) of each group of questions; a line has a K and the figures there."""
    sides = {
        side: {line["k"]: line.get("groups", {}) for line in greedy(result.get(side, []))}
        for side in ("before", "after")
    }
    table = []
    for name, title in GROUPS.items():
        lines = [
            {"k": k, "n": groups[name]["n"]}
            | {side: by_k.get(k, {}).get(name, {}) for side, by_k in sides.items()}
            for k, groups in sides["after"].items()
            if name in groups
        ]
        if lines:
            table.append((title, lines))
    return table
