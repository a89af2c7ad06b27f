"""What RL discovered: the first part of a run's report.

Greedy accuracy and calls by K over the steps of RL, beside the control; the same figures apart for
choice and grounding, and for questions whose answer the overview shows or hides; and held-out
questions that were answered wrongly before RL, and rightly after it by several crops.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from rollout.report.episode_card import EXECUTED, episode_card
from train.report.chart import Chart, lines_chart

Row = dict[str, Any]
GROUPS = {
    "mcq hidden": "choice, answer not shown",
    "mcq shown": "choice, answer shown",
    "tvg hidden": "grounding, no frame in the span",
    "tvg shown": "grounding, a frame in the span",
}
"""Titles of the groups of `rollout.evaluation.summary.row`."""


def greedy(rows: Sequence[Row]) -> list[Row]:
    """The rows of greedy decoding with parallel dispatch, in the order of K."""
    found = [row for row in rows if row["temperature"] == 0 and row["dispatch"] == "parallel"]
    return sorted(found, key=lambda row: row["k"])


def learning_curves(result: Row, last_step: int) -> list[Row]:
    """Charts of greedy evaluations over RL steps, with a line per K; [] if there are too few.

    Args:
        result: Contents of result.json.
        last_step: Number of RL steps so far.
    """
    before = [{"step": 0} | row for row in greedy(result.get("before", []))]
    after = [{"step": last_step} | row for row in greedy(result.get("after", []))]
    if not last_step or not before or not after:
        return []
    rows = [*before, *result.get("curve", []), *after]
    control = [{"step": last_step} | row for row in result.get("control", [])]

    def chart(value: Callable[[Row], float | None], high: float) -> Chart:
        solid: list[tuple[str, list[tuple[float, float | None]]]] = []
        dashed = []
        for first in before:
            k = first["k"]
            solid.append((f"K = {k}", [(row["step"], value(row)) for row in rows if row["k"] == k]))
            ends = [first, *(row for row in control if row["k"] == k)]
            dashed.append([(row["step"], value(row)) for row in ends])
        return lines_chart(solid, dashed if control else [], 0.0, high)

    def of_group(name: str, key: str) -> Callable[[Row], float | None]:
        return lambda row: row.get("groups", {}).get(name, {}).get(key)

    charts = [
        ("accuracy", "all questions", lambda row: row["accuracy"], 1.0),
        ("accuracy, choice", "", of_group("mcq", "score"), 1.0),
        ("accuracy, grounding", "mean overlap (IoU)", of_group("tvg", "score"), 1.0),
        ("crops per question", "all questions", lambda row: row["calls"], 2.0),
        ("crops, choice", "", of_group("mcq", "calls"), 2.0),
        ("crops, grounding", "", of_group("tvg", "calls"), 2.0),
    ]
    return [
        {"title": title, "note": note, "chart": chart(value, high)}
        for title, note, value, high in charts
    ]


def group_table(result: Row) -> list[tuple[str, list[Row]]]:
    """(title, lines) of each group of questions; a line has a K and the figures there."""
    sides = {name: greedy(result.get(name, [])) for name in ("before", "control", "after")}
    table = []
    for name, title in GROUPS.items():
        lines = []
        for row in sides["after"]:
            if name in row.get("groups", {}):
                line = {"k": row["k"], "n": row["groups"][name]["n"]}
                for side, rows in sides.items():
                    same_k = [other for other in rows if other["k"] == row["k"]]
                    line[side] = same_k[0]["groups"].get(name, {}) if same_k else {}
                lines.append(line)
        if lines:
            table.append((title, lines))
    return table


def choose_pairs(episodes: Sequence[Row]) -> list[tuple[Row, Row]]:
    """The same question before and after RL, greedily decoded: at most one pair per kind.

    A pair is chosen if the answer was wrong without a crop before RL, and is right after several
    crops in one turn now; the smallest K comes first.
    """
    before = {_key(row): row for row in episodes if row.get("phase") == "before"}
    pairs: dict[str, tuple[Row, Row]] = {}
    for row in sorted(episodes, key=lambda row: row["k"]):
        old = before.get(_key(row))
        if row.get("phase") != "after" or row["temperature"] or old is None:
            continue
        side_by_side = max((_executed(turn) for turn in row["turns"]), default=0)
        learned = row["rewards"]["accuracy"] == 1 and side_by_side > 1
        guessed = old["rewards"]["accuracy"] < 0.5 and not any(t["calls"] for t in old["turns"])
        if learned and guessed:
            pairs.setdefault(row["question"]["kind"], (old, row))
    return [pairs[kind] for kind in sorted(pairs)]


def _executed(turn: Row) -> int:
    """The number of a turn's calls that were carried out."""
    return sum(call["status"] in EXECUTED for call in turn["calls"])


def _key(row: Row) -> tuple[Any, ...]:
    return row["question"]["id"], row["k"], row["temperature"], row["dispatch"]


def pair_cards(root: pathlib.Path, episodes: Sequence[Row]) -> list[tuple[Row, Row]]:
    """The cards of `choose_pairs`, unfolded."""
    return [
        (episode_card(root, old, True), episode_card(root, new, True))
        for old, new in choose_pairs(episodes)
    ]
