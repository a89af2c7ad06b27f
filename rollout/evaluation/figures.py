"""Computes figures of episodes: those of one setting for a training run, or of a split's lines."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from paravt_jax.method.rewards import published_format
from rollout.agent.episode import EpisodeSettings
from rollout.agent.scoring import tool_gap
from rollout.evaluation.play import Played, measures
from rollout.evaluation.statistics import interval

Measures = dict[str, Any]
"""What `rollout.evaluation.play.measures` says of an episode."""


def row(setting: EpisodeSettings, played: Sequence[Played]) -> dict[str, Any]:
    """Summarise the episodes of one setting for result.json: the setting and its figures.

    `groups` has the figures by kind of question and, where it is known, by whether an overview
    frame shows the answer: "mcq", "mcq shown", "mcq hidden", "shown", and so on. `format_reward`
    is the mean of `published_format`. `tool_gap` is the accuracy of episodes with calls minus that
    of episodes without, None if one of the two is missing.

    Raises:
        ValueError: there are no episodes.
    """
    if not played:
        raise ValueError(
            "evaluation.questions: no question has a readable video; check --data.media"
        )
    lines = [measures(outcome) for outcome in played]
    episodes = [outcome.episode for outcome in played]
    return {
        "k": setting.frames,
        "dispatch": setting.dispatch,
        "temperature": setting.temperature,
        **figures(lines),
        "format_reward": float(np.mean([published_format(e.turns) for e in episodes])),
        "tool_gap": tool_gap([outcome.rewards.accuracy for outcome in played], episodes),
        "groups": {
            name: group_figures(group) | {"parallel": _parallel(group)}
            for name, group in by_group(lines, _groups_of).items()
        },
    }


def _groups_of(line: Measures) -> list[str]:
    if line["shown"] is None:
        return [line["kind"]]
    overview = "shown" if line["shown"] else "hidden"
    return [line["kind"], overview, f"{line['kind']} {overview}"]


def _parallel(lines: Sequence[Measures]) -> float | None:
    """Of the turns in which tools ran, the share with several calls; None: no tool ran."""
    turns = sum(line["tool_turns"] for line in lines)
    parallel = sum(line["parallel_turns"] for line in lines)
    return parallel / turns if turns else None


def figures(lines: Sequence[Measures]) -> dict[str, Any]:
    """Compute the figures of episodes from their `measures`.

    Returns:
        accuracy: mean score: 0 or 1 for a choice, IoU for grounding, F1 for open-ended answers.
        interval: 95 % interval of the accuracy.
        compliance: share of episodes in which every turn parses and the last ends in an answer
            block. The paper's f is the mean format reward instead.
        calls: executed calls per episode, the paper's kappa.
        turns: turns of the main agent per episode.
        n: number of episodes.
        share_with_calls: share of episodes with at least one executed call.
        refused_reports: number of sub-agents' requests that the server refused.
        without_answer: number of episodes without an answer.
        unread: number of answers that name no option or span.
        stops: number of episodes by the reason why they ended.
    """
    calls = [line["calls"] for line in lines]
    return {
        "accuracy": float(np.mean([line["score"] for line in lines])),
        "interval": interval_of(lines),
        "compliance": float(np.mean([line["compliant"] for line in lines])),
        "calls": float(np.mean(calls)),
        "turns": float(np.mean([line["turn_count"] for line in lines])),
        "n": len(lines),
        "share_with_calls": float(np.mean([count > 0 for count in calls])),
        "refused_reports": sum(line["refused_reports"] for line in lines),
        "without_answer": count_unanswered(lines),
        "unread": sum(line["unread"] for line in lines),
        "stops": dict(sorted(collections.Counter(line["stop"] for line in lines).items())),
    }


def count_unanswered(lines: Sequence[Measures]) -> int:
    """Return the number of episodes without an answer."""
    return sum(line["read"] is None for line in lines)


def interval_of(lines: Sequence[Measures]) -> list[float]:
    """Return the 95 % interval of the mean score."""
    return list(interval([line["score"] for line in lines], [line["video"] for line in lines]))


def by_group(
    lines: Sequence[Measures], groups_of: Callable[[Measures], Iterable[str]]
) -> dict[str, list[Measures]]:
    """Return the episodes of every group. One may be in several groups, or in none."""
    found: dict[str, list[Measures]] = collections.defaultdict(list)
    for line in lines:
        for group in groups_of(line):
            if group:
                found[group].append(line)
    return dict(sorted(found.items()))


def group_figures(lines: Sequence[Measures]) -> dict[str, Any]:
    """Return the few figures that groups of episodes have."""
    return {
        "score": float(np.mean([line["score"] for line in lines])),
        "n": len(lines),
        "interval": interval_of(lines),
        "calls": float(np.mean([line["calls"] for line in lines])),
    }
