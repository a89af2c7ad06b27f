"""Computes the figures of an evaluation, from episodes (`row`) or a split's lines (`summarise`).

Both use `figures`, so they share its names. Means are over the episodes that were played. Questions
that were left out are counted and listed. The order of the lines does not matter.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paravt_jax.method.records import QuestionKind
from paravt_jax.method.rewards import published_format
from rollout.agent.episode import EpisodeSettings
from rollout.agent.scoring import tool_gap
from rollout.evaluation.folder import FolderError, Line, latest, read_json
from rollout.evaluation.play import Played, measures
from rollout.evaluation.statistics import Score, interval

RECALL = (0.3, 0.5, 0.7)
"""Overlaps for grounding recall: the share of answers whose IoU is at least that high."""

APART = {"grounding": "grounding", "open_ended": "open-ended"}
"""The fields of a summary with figures of further kinds of question, with the names to show."""

SAME = 1e-9
"""Two scores of an answer that are closer than this are the same."""

NAMED = 1000
"""Upper bound on the videos that a summary lists per cause of being left out."""


def summarise(
    config: Line,
    lines: Iterator[Line],
    questions: int,
    broken: Mapping[str, str],
    score: Score = "accuracy",
) -> Line:
    """Compute the content of summary.json.

    The score is that of multiple choice, or of grounding if there is no choice. A mean over several
    kinds would be meaningless, so `APART` names the figures of the others.

    Args:
        config: the content of config.json.
        lines: the lines of all shards.
        questions: the number of questions in the split.
        broken: row number -> reason, for every row of the split that cannot be asked.
        score: the name of the mean score.
    """
    # Sorted, so that the summary does not depend on the order in which questions were finished.
    found = sorted(latest(lines).values(), key=lambda line: line["id"])
    played = [line for line in found if "left_out" not in line]
    return {
        "benchmark": config["identity"]["benchmark"],
        "questions": questions,
        "n": len(played),
        **(_split_figures(played, score) if played else {}),
        "left_out": _left_out([line for line in found if "left_out" in line]),
        "broken_rows": dict(broken),
        "config": config,
    }


def read_summary(folder: pathlib.Path) -> Line:
    """Read an evaluation's summary.json.

    Raises:
        FolderError: there is none, or an older version of this code wrote it.
    """
    file = folder / "summary.json"
    summary = read_json(file)
    keys = ("benchmark", "questions", "n", "left_out", "broken_rows", "config")
    missing = [key for key in keys if key not in summary]
    if missing:
        raise FolderError(
            f"{file}: {', '.join(missing)} missing, so an older version of this code wrote it; "
            "play the questions again with the same command and another --out"
        )
    return summary


def rows_of(summary: Line) -> int:
    """The number of rows in the split's files: its questions and its broken rows."""
    return summary["questions"] + len(summary["broken_rows"])


def not_played(summary: Line) -> dict[str, int]:
    """The number of rows that the score leaves out, by cause."""
    causes = {cause: found["questions"] for cause, found in summary["left_out"].items()}
    if summary["broken_rows"]:
        causes["broken"] = causes.get("broken", 0) + len(summary["broken_rows"])
    not_asked = rows_of(summary) - summary["n"] - sum(causes.values())
    if not_asked:
        causes["not_asked"] = not_asked
    return causes


def score_of(summary: Line) -> float | None:
    """A split's mean score in [0, 1]; None if no closed question was played."""
    return summary.get("miou", summary.get("accuracy"))


def scored(summary: Line) -> int:
    """The number of questions behind the score: those that were played, without other kinds."""
    return summary["n"] - sum(summary[field]["n"] for field in APART if field in summary)


def row(setting: EpisodeSettings, played: Sequence[Played]) -> Line:
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
            "evaluation.questions: no question has a readable video; check the data root"
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
            name: _group(members) | {"parallel": _parallel(members)}
            for name, members in _members(lines, _groups_of).items()
        },
    }


def _groups_of(line: Line) -> list[str]:
    if line["shown"] is None:
        return [line["kind"]]
    overview = "shown" if line["shown"] else "hidden"
    return [line["kind"], overview, f"{line['kind']} {overview}"]


def _parallel(lines: Sequence[Line]) -> float | None:
    """Of the turns in which tools ran, the share with several calls; None: no tool ran."""
    turns = sum(line["tool_turns"] for line in lines)
    parallel = sum(line["parallel_turns"] for line in lines)
    return parallel / turns if turns else None


def figures(lines: Sequence[Line]) -> dict[str, Any]:
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
        "interval": _interval(lines),
        "compliance": float(np.mean([line["compliant"] for line in lines])),
        "calls": float(np.mean(calls)),
        "turns": float(np.mean([line["turn_count"] for line in lines])),
        "n": len(lines),
        "share_with_calls": float(np.mean([count > 0 for count in calls])),
        "refused_reports": sum(line["refused_reports"] for line in lines),
        "without_answer": _without_answer(lines),
        "unread": sum(line["unread"] for line in lines),
        "stops": dict(sorted(collections.Counter(line["stop"] for line in lines).items())),
    }


def _split_figures(played: Sequence[Line], score: Score) -> dict[str, Any]:
    """`figures` for a split: scores cover one kind of question each, and groups are added.

    So does `without_answer`.
    """
    found = figures(played)
    # These two cover all kinds. The split's own score replaces them below.
    del found["accuracy"], found["interval"]
    choice, grounding, open_ended = (
        [line for line in played if line["kind"] == kind] for kind in QuestionKind
    )
    closed = choice or grounding
    found["without_answer"] = _without_answer(closed)
    if closed:
        scores = np.array([line["score"] for line in closed])
        found[score] = float(np.mean(scores))
        found["interval"] = _interval(closed)
        if score == "miou":
            for overlap in RECALL:
                found[f"r@{overlap}"] = float(np.mean(scores >= overlap))
        found["other_readings"] = other_readings(closed)
    for field, lines in (("grounding", grounding if choice else []), ("open_ended", open_ended)):
        if lines:
            found[field] = _group(lines) | {"without_answer": _without_answer(lines)}
    subtitled = sum(line["subtitles"] is not None for line in played)
    if subtitled:
        found["with_subtitles"] = subtitled
    return found | {
        "interval_kind": (
            "95 %, Wilson at the effective number of questions (cluster-robust by video)"
        ),
        "seconds_per_question": float(np.mean([line["spent"] for line in played])),
        "by_duration": _by(closed or open_ended, lambda line: [line["duration"]]),
        "by_task": _by(closed or open_ended, lambda line: line["tasks"]),
    }


def other_readings(played: Sequence[Line]) -> dict[str, Any]:
    """The scores of the same answers under other readings than ours, by the reading's name.

    Returns:
        For each reading its mean score with its interval, the number `n` of questions that it
        covers, our score on these questions (`ours`), and the number of questions whose score
        differs from ours (`differ`).
    """
    names = sorted({name for line in played for name in line.get("other_scores", {})})
    found: dict[str, Any] = {}
    for name in names:
        covered = [line for line in played if name in line.get("other_scores", {})]
        theirs = [line["other_scores"][name] for line in covered]
        ours = [line["score"] for line in covered]
        found[name] = {
            "score": float(np.mean(theirs)),
            "interval": list(interval(theirs, [line["video"] for line in covered])),
            "n": len(covered),
            "ours": float(np.mean(ours)),
            "differ": sum(abs(a - b) > SAME for a, b in zip(theirs, ours, strict=True)),
        }
    return found


def _without_answer(lines: Sequence[Line]) -> int:
    return sum(line["read"] is None for line in lines)


def _interval(lines: Sequence[Line]) -> list[float]:
    return list(interval([line["score"] for line in lines], [line["video"] for line in lines]))


def _by(played: Sequence[Line], groups_of: Callable[[Line], Iterable[str]]) -> dict[str, Any]:
    """The figures of every group. A question may be in several groups, or in none."""
    return {group: _group(lines) for group, lines in _members(played, groups_of).items()}


def _members(
    lines: Sequence[Line], groups_of: Callable[[Line], Iterable[str]]
) -> dict[str, list[Line]]:
    """The lines of every group, by its name."""
    found: dict[str, list[Line]] = collections.defaultdict(list)
    for line in lines:
        for group in groups_of(line):
            if group:
                found[group].append(line)
    return dict(sorted(found.items()))


def _group(lines: Sequence[Line]) -> dict[str, Any]:
    return {
        "score": float(np.mean([line["score"] for line in lines])),
        "n": len(lines),
        "interval": _interval(lines),
        "calls": float(np.mean([line["calls"] for line in lines])),
    }


def _left_out(lines: Sequence[Line]) -> dict[str, Any]:
    """For each cause: the number of questions, and the videos with the reason for each."""
    causes: dict[str, Any] = {}
    for line in lines:
        cause = causes.setdefault(line["left_out"], {"questions": 0, "videos": {}})
        cause["questions"] += 1
        if len(cause["videos"]) < NAMED:
            cause["videos"].setdefault(line["video"], line["reason"])
    return causes
