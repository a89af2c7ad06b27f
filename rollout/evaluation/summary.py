"""The figures of an evaluation: of a run's episodes (`row`), and of a split's lines (`summarise`).

Both are made by `figures`, under the same names. Means are over the episodes that were played;
those left out are counted and named. The same lines give the same summary in any order.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paravt_jax.method.records import QuestionKind
from rollout.agent.episode import EpisodeSettings
from rollout.evaluation.folder import FolderError, Line, latest, read_json
from rollout.evaluation.play import Played, measures
from rollout.evaluation.statistics import Score, interval

RECALL = (0.3, 0.5, 0.7)  # of grounding: the share of answers that overlap at least so much
NAMED = 1000  # videos that are left out are named up to so many


def summarise(
    config: Line,
    lines: Iterator[Line],
    questions: int,
    broken: Mapping[str, str],
    score: Score = "accuracy",
) -> Line:
    """summary.json: `questions` is the number that the split has, `broken` its rows that are none.

    `score` names the mean score. Open-ended answers have figures of their own, `open_ended`: their
    F1 and the share of letters that are right have no common mean.
    """
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
    """An evaluation's summary.json. FolderError without one, and for one of an older version."""
    file = folder / "summary.json"
    summary = read_json(file)
    keys = ("benchmark", "questions", "n", "left_out", "broken_rows", "config")
    if missing := [key for key in keys if key not in summary]:
        raise FolderError(
            f"{file}: it lacks {', '.join(missing)}, so an older version of this code wrote it; "
            "play the questions again with the same command and another --out"
        )
    return summary


def rows_of(summary: Line) -> int:
    """Rows of a split: its questions, and those that are none."""
    return summary["questions"] + len(summary["broken_rows"])


def not_played(summary: Line) -> dict[str, int]:
    """By cause: how many rows of the split its score says nothing about."""
    causes = {cause: found["questions"] for cause, found in summary["left_out"].items()}
    if summary["broken_rows"]:
        causes["broken"] = len(summary["broken_rows"])
    if rest := rows_of(summary) - summary["n"] - sum(causes.values()):
        causes["not_asked"] = rest
    return causes


def score_of(summary: Line) -> float | None:
    """A split's score; None where none of its closed questions was played."""
    return summary.get("miou", summary.get("accuracy"))


def row(setting: EpisodeSettings, played: Sequence[Played]) -> Line:
    """The row of a run's evaluation: the setting, and the figures of its episodes.

    ValueError where there are none.
    """
    if not played:
        raise ValueError(
            "evaluation.questions: not one question has a readable video; check the data root"
        )
    about = {"k": setting.frames, "dispatch": setting.dispatch, "temperature": setting.temperature}
    return about | figures([measures(one) for one in played])


def figures(lines: Sequence[Line]) -> dict[str, Any]:
    """The figures of episodes, from their `measures`.

    accuracy: mean score (right or wrong, the IoU of grounding, the F1 of open-ended answers), and
    its interval. format: share of episodes whose every turn parses and that end in an answer block
    (the paper's f is a mean reward instead). calls: executed calls per episode, kappa. turns: those
    of the main agent. n: episodes.
    """
    calls = [line["calls"] for line in lines]
    return {
        "accuracy": float(np.mean([line["score"] for line in lines])),
        "interval": _interval(lines),
        "format": float(np.mean([line["compliant"] for line in lines])),
        "calls": float(np.mean(calls)),
        "turns": float(np.mean([line["turn_count"] for line in lines])),
        "n": len(lines),
        "share_with_calls": float(np.mean([count > 0 for count in calls])),
        "refused_reports": sum(line["refused_reports"] for line in lines),
        "without_answer": sum(line["read"] is None for line in lines),
        "unread": sum(line["unread"] for line in lines),
        "stops": dict(sorted(collections.Counter(line["stop"] for line in lines).items())),
    }


def _split_figures(played: Sequence[Line], score: Score) -> dict[str, Any]:
    """`figures` of a split, with the score of its closed questions and what only a split has."""
    found = figures(played)
    del found["accuracy"], found["interval"]
    open_ended = [line for line in played if line["kind"] == QuestionKind.OPEN_ENDED]
    closed = [line for line in played if line["kind"] != QuestionKind.OPEN_ENDED]
    if closed:
        scores = [line["score"] for line in closed]
        found |= {score: float(np.mean(scores)), "interval": _interval(closed)}
        if score == "miou":
            found |= {f"r@{bound}": float(np.mean(np.array(scores) >= bound)) for bound in RECALL}
    if open_ended:
        found["open_ended"] = _group(open_ended)
    if subtitled := [line for line in played if line["subtitles"] is not None]:
        found["with_subtitles"] = len(subtitled)
    return found | {
        "interval_kind": "95 %, Wilson at the effective number of questions (cluster-robust by video)",
        "seconds_per_question": float(np.mean([line["spent"] for line in played])),
        "by_duration": _by(played, lambda line: [line["duration"]]),
        "by_task": _by(played, lambda line: line["tasks"]),
    }


def _interval(lines: Sequence[Line]) -> list[float]:
    return list(interval([line["score"] for line in lines], [line["video"] for line in lines]))


def _by(played: Sequence[Line], groups: Any) -> dict[str, Any]:
    """Score, number of questions and interval of every group; a question may stand in several, or in none."""
    found: dict[str, list[Line]] = collections.defaultdict(list)
    for line in played:
        for group in groups(line):
            if group:
                found[group].append(line)
    return {group: _group(lines) for group, lines in sorted(found.items())}


def _group(lines: Sequence[Line]) -> dict[str, Any]:
    return {
        "score": float(np.mean([line["score"] for line in lines])),
        "n": len(lines),
        "interval": _interval(lines),
        "calls": float(np.mean([line["calls"] for line in lines])),
    }


def _left_out(lines: Sequence[Line]) -> dict[str, Any]:
    """By cause: how many questions, and which videos with what reason."""
    causes: dict[str, Any] = {}
    for line in lines:
        cause = causes.setdefault(line["left_out"], {"questions": 0, "videos": {}})
        cause["questions"] += 1
        if len(cause["videos"]) < NAMED:
            cause["videos"].setdefault(line["video"], line["reason"])
    return causes
