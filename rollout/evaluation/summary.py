"""Computes the summary of a split from its lines.

Means are over the questions that were played (`rollout.evaluation.figures`). Those that were left
out are counted and listed. The order of the lines does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paravt_jax.method.records import QuestionKind
from rollout.evaluation.benchmarks import BENCHMARKS
from rollout.evaluation.figures import by_group, figures, group_figures
from rollout.evaluation.folder import Line, latest

RECALL = (0.3, 0.5, 0.7)
"""Overlaps for grounding recall: the share of answers whose IoU is at least that high."""

APART = {"grounding": "grounding", "open_ended": "open-ended"}
"""The fields of a summary with figures of further kinds of question, with the names to show."""

NAMED = 1000
"""Upper bound on the videos that a summary lists per cause of being left out."""


def summarise(
    config: Line, lines: Iterator[Line], questions: int, broken: Mapping[str, str]
) -> Line:
    """Compute the content of summary.json.

    The score is that of multiple choice, or of grounding if there is no choice. A mean over several
    kinds would be meaningless, so `APART` names the figures of the others.

    Args:
        config: the content of config.json.
        lines: the lines of all shards.
        questions: the number of questions in the split.
        broken: row number -> reason, for every row of the split that cannot be asked.
    """
    # Sorted, so that the summary does not depend on the order in which questions were finished.
    found = sorted(latest(lines).values(), key=lambda line: line["id"])
    played = []
    left_out: dict[str, Any] = {}
    for line in found:
        if "left_out" not in line:
            played.append(line)
            continue
        cause = left_out.setdefault(line["left_out"], {"questions": 0, "videos": {}})
        cause["questions"] += 1
        if len(cause["videos"]) < NAMED:
            cause["videos"].setdefault(line["video"], line["reason"])
    benchmark = config["identity"]["benchmark"]
    score = BENCHMARKS[benchmark].score if benchmark in BENCHMARKS else "accuracy"
    return {
        "benchmark": benchmark,
        "questions": questions,
        "n": len(played),
        **(_split_figures(played, score) if played else {}),
        "left_out": left_out,
        "broken_rows": dict(broken),
        "config": config,
    }


def rows_of(summary: Line) -> int:
    """Return the number of rows in the split's files: its questions and its broken rows."""
    return summary["questions"] + len(summary["broken_rows"])


def not_played(summary: Line) -> dict[str, int]:
    """Return the number of rows that the score leaves out, by cause."""
    causes = {cause: found["questions"] for cause, found in summary["left_out"].items()}
    causes["broken"] = causes.get("broken", 0) + len(summary["broken_rows"])
    causes["not_asked"] = rows_of(summary) - summary["n"] - sum(causes.values())
    return {cause: count for cause, count in causes.items() if count}


def score_of(summary: Line) -> float | None:
    """Return a split's mean score in [0, 1]; None if no closed question was played."""
    return summary.get("miou", summary.get("accuracy"))


def scored(summary: Line) -> int:
    """Return the number of questions behind the score: those that were played, without other
    kinds."""
    return summary["n"] - sum(summary[field]["n"] for field in APART if field in summary)


def _split_figures(played: Sequence[Line], score: str) -> dict[str, Any]:
    """`figures` for a split: scores cover one kind of question each, and groups are added."""
    choice, grounding, open_ended = (
        [line for line in played if line["kind"] == kind] for kind in QuestionKind
    )
    closed = choice or grounding
    found = figures(played) | {"without_answer": _unanswered(closed)}
    if closed:
        scores = group_figures(closed)
        found |= {score: scores["score"], "interval": scores["interval"]}
        if score == "miou":
            overlaps = np.array([line["score"] for line in closed])
            found |= {f"r@{least}": float(np.mean(overlaps >= least)) for least in RECALL}
    for field, lines in (("grounding", grounding if choice else []), ("open_ended", open_ended)):
        if lines:
            found[field] = group_figures(lines) | {"without_answer": _unanswered(lines)}
    subtitled = sum(line["subtitles"] is not None for line in played)
    if subtitled:
        found["with_subtitles"] = subtitled
    return found | {
        "seconds_per_question": float(np.mean([line["spent"] for line in played])),
        "by_duration": by_group(closed or open_ended, lambda line: [line["duration"]]),
        "by_task": by_group(closed or open_ended, lambda line: line["tasks"]),
    }


def _unanswered(lines: Sequence[Line]) -> int:
    return sum(line["read"] is None for line in lines)
