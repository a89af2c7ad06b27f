"""What was learned: the first part of a run's report.

Greedy accuracy and calls by K over the steps of RL; the same figures for choice and grounding
separately, and by whether an overview frame shows the answer; and questions answered wrongly
without crops before RL, and rightly with crops side by side after it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from paravt_extras.report.chart import Chart, lines_chart
from rollout.report.episode_card import EXECUTED, episode_card

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


def greedy_curve(result: Record, last_step: int) -> list[Record]:
    """Return the greedy lines before, during and after RL, each with its `step`.

    Args:
        result: Contents of result.json.
        last_step: Number of RL steps.
    """
    before = [{"step": 0} | line for line in greedy(result.get("before", []))]
    after = [{"step": last_step} | line for line in greedy(result.get("after", []))]
    return [*before, *result.get("curve", []), *after]


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
    evaluated = greedy_curve(result, last_step)
    before = [line for line in evaluated if line["step"] == 0]
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


def choose_pairs(episodes: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Return the same question before and after RL, greedily decoded: at most one pair per kind.

    In a pair there is no call and a score below 0.5 before RL, and a score of 1 with several crops
    in one turn after it. Of each kind of question, the pair with the smallest K is chosen.
    """
    before = {_key(episode): episode for episode in episodes if episode.get("phase") == "before"}
    pairs: dict[str, tuple[Record, Record]] = {}
    for episode in sorted(episodes, key=lambda episode: episode["k"]):
        old = before.get(_key(episode))
        if episode.get("phase") != "after" or episode["temperature"] or old is None:
            continue
        side_by_side = max((_executed(turn) for turn in episode["turns"]), default=0)
        learned = episode["rewards"]["accuracy"] == 1 and side_by_side > 1
        guessed = old["rewards"]["accuracy"] < 0.5 and not any(t["calls"] for t in old["turns"])
        if learned and guessed:
            pairs.setdefault(episode["question"]["kind"], (old, episode))
    return [pairs[kind] for kind in sorted(pairs)]


def _executed(turn: Record) -> int:
    """Return the number of a turn's calls that were carried out."""
    return sum(call["status"] in EXECUTED for call in turn["calls"])


def _key(episode: Record) -> tuple[Any, ...]:
    return episode["question"]["id"], episode["k"], episode["temperature"], episode["dispatch"]


def pair_cards(root: pathlib.Path, episodes: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Return the cards of `choose_pairs`, unfolded."""
    return [
        (episode_card(root, old, True), episode_card(root, new, True))
        for old, new in choose_pairs(episodes)
    ]
