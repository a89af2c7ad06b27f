"""Computes the figures of episodes: those of a setting in a training run, or of a split."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from paravt_jax.method.rewards import published_format, tool_gap
from rollout.agent.episode import EpisodeSettings
from rollout.evaluation.play import Played, measures
from rollout.evaluation.statistics import interval

Measures = dict[str, Any]
"""What `rollout.evaluation.play.measures` says of an episode."""


def summarise_setting(setting: EpisodeSettings, played: Sequence[Played]) -> dict[str, Any]:
    """Summarise the episodes of one setting for result.json: the setting and its figures.

    `accuracy` is the mean score: 0 or 1 for a choice, IoU for grounding, F1 for open-ended answers.
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
    scores = group_figures(lines)
    episodes = [outcome.episode for outcome in played]
    return {
        "k": setting.frames,
        "dispatch": setting.dispatch,
        "temperature": setting.temperature,
        "accuracy": scores["score"],
        "interval": scores["interval"],
        **figures(lines),
        "format_reward": float(np.mean([published_format(e.turns) for e in episodes])),
        "tool_gap": tool_gap([outcome.rewards.accuracy for outcome in played], episodes),
        "groups": by_group(lines, _groups_of),
    }


def _groups_of(line: Measures) -> list[str]:
    if line["shown"] is None:
        return [line["kind"]]
    overview = "shown" if line["shown"] else "hidden"
    return [line["kind"], overview, f"{line['kind']} {overview}"]


def figures(lines: Sequence[Measures]) -> dict[str, Any]:
    """Compute the figures of episodes from their `measures`.

    Returns:
        compliance: share of episodes in which every turn parses and the last ends in an answer
            block. The paper's f is the mean format reward instead.
        calls: executed calls per episode, the paper's kappa.
        turns: turns of the main agent per episode.
        n: number of episodes.
        without_answer: number of episodes without an answer.
        unread: number of answers that name no option or span.
        stops: number of episodes by the reason why they ended.
    """
    return {
        "compliance": float(np.mean([line["compliant"] for line in lines])),
        "calls": float(np.mean([line["calls"] for line in lines])),
        "turns": float(np.mean([line["turn_count"] for line in lines])),
        "n": len(lines),
        "without_answer": sum(line["read"] is None for line in lines),
        "unread": sum(line["unread"] for line in lines),
        "stops": dict(sorted(collections.Counter(line["stop"] for line in lines).items())),
    }


def by_group(
    lines: Sequence[Measures], groups_of: Callable[[Measures], Iterable[str]]
) -> dict[str, dict[str, Any]]:
    """Return the figures of every group. An episode may be in several groups, or in none."""
    groups: dict[str, list[Measures]] = collections.defaultdict(list)
    for line in lines:
        for group in filter(None, groups_of(line)):
            groups[group].append(line)
    return {group: group_figures(groups[group]) for group in sorted(groups)}


def group_figures(lines: Sequence[Measures]) -> dict[str, Any]:
    """Return the figures that groups of episodes have.

    Returns:
        score: the mean score.
        n: number of episodes.
        interval: 95 % interval of the mean score.
        calls: executed calls per episode.
        parallel: share with several calls of the turns in which tools ran; None: no tool ran.
    """
    scores = [line["score"] for line in lines]
    tool_turns = sum(line["tool_turns"] for line in lines)
    parallel_turns = sum(line["parallel_turns"] for line in lines)
    return {
        "score": float(np.mean(scores)),
        "n": len(lines),
        "interval": list(interval(scores, [line["video"] for line in lines])),
        "calls": float(np.mean([line["calls"] for line in lines])),
        "parallel": parallel_turns / tool_turns if tool_turns else None,
    }
