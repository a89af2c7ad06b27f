"""Computes the summary of a split from its lines, and reads it again.

Means are over the questions that were played (`rollout.evaluation.figures`). Those that were left
out are counted and listed. The order of the lines does not matter.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paravt_jax.method.records import QuestionKind
from rollout.evaluation.figures import (
    by_group,
    count_unanswered,
    figures,
    group_figures,
    interval_of,
)
from rollout.evaluation.folder import FolderError, Line, latest, read_json

RECALL = (0.3, 0.5, 0.7)
"""Overlaps for grounding recall: the share of answers whose IoU is at least that high."""

APART = {"grounding": "grounding", "open_ended": "open-ended"}
"""The fields of a summary with figures of further kinds of question, with the names to show."""

NAMED = 1000
"""Upper bound on the videos that a summary lists per cause of being left out."""


def summarise(
    config: Line,
    lines: Iterator[Line],
    questions: int,
    broken: Mapping[str, str],
    score: str = "accuracy",
) -> Line:
    """Compute the content of summary.json.

    The score is that of multiple choice, or of grounding if there is no choice. A mean over several
    kinds would be meaningless, so `APART` names the figures of the others.

    Args:
        config: the content of config.json.
        lines: the lines of all shards.
        questions: the number of questions in the split.
        broken: row number -> reason, for every row of the split that cannot be asked.
        score: the name of the mean score, "accuracy" or "miou" (grounding).
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
    if not missing and "wording" not in summary["config"]["identity"]:
        missing = ["config.identity.wording"]
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


def _split_figures(played: Sequence[Line], score: str) -> dict[str, Any]:
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
    found["without_answer"] = count_unanswered(closed)
    if closed:
        scores = np.array([line["score"] for line in closed])
        found[score] = float(np.mean(scores))
        found["interval"] = interval_of(closed)
        if score == "miou":
            for overlap in RECALL:
                found[f"r@{overlap}"] = float(np.mean(scores >= overlap))
    for field, lines in (("grounding", grounding if choice else []), ("open_ended", open_ended)):
        if lines:
            found[field] = group_figures(lines) | {"without_answer": count_unanswered(lines)}
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


def _by(played: Sequence[Line], groups_of: Callable[[Line], Iterable[str]]) -> dict[str, Any]:
    """The figures of every group. A question may be in several groups, or in none."""
    return {group: group_figures(lines) for group, lines in by_group(played, groups_of).items()}


def _left_out(lines: Sequence[Line]) -> dict[str, Any]:
    """For each cause: the number of questions, and the videos with the reason for each."""
    causes: dict[str, Any] = {}
    for line in lines:
        cause = causes.setdefault(line["left_out"], {"questions": 0, "videos": {}})
        cause["questions"] += 1
        if len(cause["videos"]) < NAMED:
            cause["videos"].setdefault(line["video"], line["reason"])
    return causes
