"""The numbers of an evaluation, from its lines.

Owns what is counted and over which questions: means are over those that were played; those left out are counted and named. Invariant: the
same lines give the same summary, in whatever order they were written.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paravt_jax.method.records import QuestionKind
from rollout.evaluation.benchmarks import BENCHMARKS
from rollout.evaluation.benchmarks.scoring import interval
from rollout.evaluation.folder import Line, latest

RECALL = (0.3, 0.5, 0.7)  # of grounding: the share of answers that overlap at least so much
NAMED = 1000  # videos that are left out are named up to so many


def summarise(
    config: Line, lines: Iterator[Line], questions: int, broken: Mapping[str, str]
) -> Line:
    """summary.json: `questions` is the number that the split has, `broken` its rows that are none."""
    found = sorted(latest(lines).values(), key=lambda line: line["id"])
    played = [line for line in found if "left_out" not in line]
    identity = config["identity"]
    numbers = figures(played, BENCHMARKS[identity["benchmark"]].grounding) if played else {}
    return {
        "benchmark": identity["benchmark"],
        "questions": questions,
        "played": len(played),
        **numbers,
        **(
            {
                "by_duration": _by(played, lambda line: [line["duration"]]),
                "by_task": _by(played, lambda line: line["tasks"]),
            }
            if played
            else {}
        ),
        "left_out": _left_out([line for line in found if "left_out" in line]),
        "broken_rows": dict(broken),
        "config": config,
    }


def rows_of(summary: Line) -> int:
    """Rows of a split: its questions, and those that are none."""
    return summary["questions"] + len(summary["broken_rows"])


def not_played(summary: Line) -> dict[str, int]:
    """By cause: how many rows of the split its score says nothing about."""
    causes = {cause: found["questions"] for cause, found in summary["left_out"].items()}
    if summary["broken_rows"]:
        causes["broken"] = len(summary["broken_rows"])
    if rest := rows_of(summary) - summary["played"] - sum(causes.values()):
        causes["not_asked"] = rest
    return causes


def figures(played: Sequence[Line], grounding: bool) -> dict[str, Any]:
    """The figures of lines that were played: `accuracy` (or `miou`) with its interval, calls, time.

    Open-ended answers have figures of their own, `open_ended`: their F1 and the share of letters
    that are right have no common mean.
    """
    open_ended = [line for line in played if line["kind"] == QuestionKind.OPEN_ENDED]
    closed = [line for line in played if line["kind"] != QuestionKind.OPEN_ENDED]
    return {
        **(_scores(closed, grounding) if closed else {}),
        **({"open_ended": _group(open_ended)} if open_ended else {}),
        **_course(played),
    }


def _scores(played: Sequence[Line], grounding: bool) -> dict[str, Any]:
    scores = [line["score"] for line in played]
    main = "miou" if grounding else "accuracy"
    recall = (
        {f"r@{bound}": float(np.mean([score >= bound for score in scores])) for bound in RECALL}
        if grounding
        else {}
    )
    return {
        main: float(np.mean(scores)),
        **recall,
        "interval": list(interval(scores, [line["video"] for line in played])),
        "interval_kind": "95 %, Wilson at the effective number of questions (cluster-robust by video)",
    }


def _course(played: Sequence[Line]) -> dict[str, Any]:
    """How the questions went, whatever the answers were worth."""
    calls = [line["calls"] for line in played]
    subtitles = [line["subtitles"] for line in played]
    return {
        "calls_per_question": float(np.mean(calls)),
        "share_with_calls": float(np.mean([count > 0 for count in calls])),
        "format": float(np.mean([line["compliant"] for line in played])),
        "refused_reports": sum(line.get("refused_reports", 0) for line in played),
        "without_answer": sum(line["read"] is None for line in played),
        "unread": sum(line.get("unread", False) for line in played),
        "stops": dict(sorted(collections.Counter(line["stop"] for line in played).items())),
        "seconds_per_question": float(np.mean([line["spent"] for line in played])),
        **(
            {"with_subtitles": sum(count is not None for count in subtitles)}
            if any(count is not None for count in subtitles)
            else {}
        ),
    }


def _by(played: Sequence[Line], groups: Any) -> dict[str, Any]:
    """Score, number of questions and interval of every group; a question may stand in several, or in none."""
    found: dict[str, list[Line]] = collections.defaultdict(list)
    for line in played:
        for group in groups(line):
            if group:
                found[group].append(line)
    return {group: _group(lines) for group, lines in sorted(found.items())}


def _group(lines: Sequence[Line]) -> dict[str, Any]:
    scores = [line["score"] for line in lines]
    return {
        "score": float(np.mean(scores)),
        "n": len(lines),
        "interval": list(interval(scores, [line["video"] for line in lines])),
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
