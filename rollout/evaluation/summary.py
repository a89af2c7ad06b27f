"""Computes the summary of a split from its lines, and formats it as text.

Means are over the questions that were played (`rollout.evaluation.figures`). Those that were left
out are counted and listed. The order of the lines does not matter.
"""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paravt_jax.method.records import QuestionKind
from rollout.evaluation.benchmarks import BENCHMARKS, title_of
from rollout.evaluation.figures import by_group, figures, group_figures
from rollout.evaluation.folder import Line, latest

RECALL = (0.3, 0.5, 0.7)
"""Overlaps for grounding recall: the share of answers whose IoU is at least that high."""

OTHER_KINDS = {"grounding": "grounding", "open_ended": "open-ended"}
"""The fields of a summary with figures of further kinds of question, with the names to show."""


def summarise(
    config: Line, lines: Sequence[Line], questions: int, broken: Mapping[str, str]
) -> Line:
    """Compute the content of summary.json.

    The score is that of multiple choice, or of grounding if there is no choice. A mean over several
    kinds would be meaningless, so `OTHER_KINDS` names the figures of the others.

    Args:
        config: the content of config.json.
        lines: the lines of all processes.
        questions: the number of questions in the split.
        broken: the reason of every record of the split that cannot be asked, by its number.
    """
    # Sorted, so that the summary does not depend on the order in which questions were finished.
    finished = sorted(latest(lines).values(), key=lambda line: line["id"])
    played = []
    left_out: dict[str, Any] = {}
    for line in finished:
        if "left_out" not in line:
            played.append(line)
            continue
        cause = left_out.setdefault(line["left_out"], {"questions": 0, "videos": {}})
        cause["questions"] += 1
        cause["videos"].setdefault(line["video"], line["reason"])
    benchmark = config["identity"]["benchmark"]
    return {
        "benchmark": benchmark,
        "questions": questions,
        "n": len(played),
        **(_split_figures(played, benchmark) if played else {}),
        "left_out": left_out,
        "broken_records": dict(broken),
        # Of all lines: replies count, also if their question was asked again.
        "servers": sum((Counter(line.get("servers")) for line in lines), Counter()),
        "config": config,
    }


def score_of(summary: Line) -> float | None:
    """Return a split's mean score in [0, 1]; None if no closed question was played."""
    return summary.get("miou", summary.get("accuracy"))


def counted(summary: Line) -> tuple[int, int]:
    """Return how many questions are behind the score, and how many records the split has."""
    others = sum(summary[field]["n"] for field in OTHER_KINDS if field in summary)
    return summary["n"] - others, summary["questions"] + len(summary["broken_records"])


def _split_figures(played: Sequence[Line], benchmark: str) -> dict[str, Any]:
    """Return `figures` of a split: scores cover one kind of question each, and groups are added."""
    choice, grounding, open_ended = (
        [line for line in played if line["kind"] == kind] for kind in QuestionKind
    )
    closed = choice or grounding
    summary = figures(played) | {"without_answer": _unanswered(closed)}
    if closed:
        score = BENCHMARKS[benchmark].score if benchmark in BENCHMARKS else "accuracy"
        scores = group_figures(closed)
        summary |= {score: scores["score"], "interval": scores["interval"]}
        if score == "miou":
            overlaps = np.array([line["score"] for line in closed])
            summary |= {f"r@{least}": float(np.mean(overlaps >= least)) for least in RECALL}
    for field, lines in (("grounding", grounding if choice else []), ("open_ended", open_ended)):
        if lines:
            summary[field] = group_figures(lines) | {"without_answer": _unanswered(lines)}
    return summary | {
        "with_subtitles": sum(line["subtitles"] is not None for line in played),
        "seconds_per_question": float(np.mean([line["spent"] for line in played])),
        "by_duration": by_group(closed or open_ended, lambda line: [line["duration"]]),
        "by_task": by_group(closed or open_ended, lambda line: line["tasks"]),
    }


def _unanswered(lines: Sequence[Line]) -> int:
    return sum(line["read"] is None for line in lines)


def report(summary: Line, out: pathlib.Path) -> Iterator[str]:
    """Format the summary as lines of text."""
    title = title_of(summary["benchmark"])
    score = score_of(summary)
    scored, records = counted(summary)
    if score is not None:
        yield f"{title}: {_points(score, summary['interval'])} on {scored} of {records} questions"
    else:
        yield f"{title}: no closed question of {records} was played"
    for field in filter(summary.__contains__, OTHER_KINDS):
        figures = summary[field]
        points = _points(figures["score"], figures["interval"])
        yield f"  {OTHER_KINDS[field]}: {points} on {figures['n']} questions"
    if summary["n"]:
        yield (
            f"  {summary['calls']:.2f} calls per question, {summary['without_answer']} without an "
            f"answer, {summary['unread']} whose answer names no option or span, "
            f"{summary['refused_reports']} refused requests of sub-agents, "
            f"{summary['seconds_per_question']:.2f} s per question"
        )
    for cause, left_out in summary["left_out"].items():
        video, reason = next(iter(left_out["videos"].items()))
        count = left_out["questions"]
        yield f"  left out, {cause.replace('_', ' ')}: {count} questions, such as {video}: {reason}"
    for number, reason in list(summary["broken_records"].items())[:1]:
        count = len(summary["broken_records"])
        yield f"  broken records: {count}, such as number {number}: {reason}"
    yield f"  {out / 'summary.json'}"


def _points(score: float, interval: Sequence[float]) -> str:
    low, high = interval
    return f"{100 * score:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
