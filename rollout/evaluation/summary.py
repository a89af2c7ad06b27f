"""Computes the summary of a split from its lines, and formats it as text and as a table.

Means are over the questions that were played (`rollout.evaluation.figures`). Those that were left
out are listed.
"""

from __future__ import annotations

import csv
import io
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paravt_jax.method.records import QuestionKind
from rollout.evaluation.benchmarks import BENCHMARKS, title_of
from rollout.evaluation.figures import by_group, figures, group_figures
from rollout.evaluation.folder import Line

RECALL = (0.3, 0.5, 0.7)
"""Overlaps for grounding recall: the share of answers whose IoU is at least that high."""

MOST_VALUES = 20
"""Figures are given by a column of your own if it has at most this many different values."""

MOST_LEFT_OUT = 0.1
"""A run fails if a larger share of its questions was left out."""

_FAILURE = ("id", "video", "left_out", "reason")
_TABLE = "id video kind right read score stop calls left_out reason".split()

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
        lines: the lines that count, with the `columns` of their questions.
        questions: the number of questions in the split.
        broken: the reason of every record of the split that cannot be asked, by its number.
    """
    # Sorted, so that means do not depend on the order of the questions, even in their last bits.
    finished = sorted(lines, key=lambda line: line["id"])
    played = [line for line in finished if "left_out" not in line]
    failures = [line for line in finished if "left_out" in line]
    benchmark = config["identity"]["benchmark"]
    return {
        "benchmark": benchmark,
        "questions": questions,
        "n": len(played),
        **(_split_figures(played, benchmark) if played else {}),
        "left_out": [{name: line[name] for name in _FAILURE} for line in failures],
        "broken_records": dict(broken),
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
    summary = figures(played) | {"without_answer": _unanswered(closed or open_ended)}
    if closed:
        score = BENCHMARKS[benchmark].score if benchmark in BENCHMARKS else "accuracy"
        scores = group_figures(closed)
        summary |= {score: scores["score"], "interval": scores["interval"]}
        if score == "miou":
            overlaps = np.array([line["score"] for line in closed])
            summary |= {f"r@{least}": float(np.mean(overlaps >= least)) for least in RECALL}
    for field, lines in (("grounding", grounding if choice else []), ("open_ended", open_ended)):
        if lines:
            others = {"without_answer": _unanswered(lines), "by_column": _by_column(lines)}
            summary[field] = group_figures(lines) | others
    return summary | {
        "with_subtitles": sum(line["subtitles"] is not None for line in played),
        "seconds_per_question": float(np.mean([line["spent"] for line in played])),
        "by_duration": by_group(closed or open_ended, lambda line: [line["duration"]]),
        "by_task": by_group(closed or open_ended, lambda line: line["tasks"]),
        "by_column": _by_column(closed or open_ended),
    }


def _by_column(lines: Sequence[Line]) -> dict[str, Any]:
    """Return figures by the values of columns of your own, as "level: hard"."""
    pairs = {pair for line in lines for pair in line["columns"].items()}
    counts = Counter(name for name, _ in pairs)
    shown = {pair: "{}: {}".format(*pair) for pair in pairs if counts[pair[0]] <= MOST_VALUES}
    return by_group(lines, lambda line: [shown.get(pair, "") for pair in line["columns"].items()])


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
    groups = {name: summary[field] for field, name in OTHER_KINDS.items() if field in summary}
    for name, group in (groups | summary.get("by_column", {})).items():
        points = _points(group["score"], group["interval"])
        yield f"  {name}: {points} on {group['n']} questions"
    if summary["n"]:
        yield (
            f"  {summary['calls']:.2f} calls per question, {summary['without_answer']} without an "
            f"answer, {summary['unread']} whose answer names no option or span, "
            f"{summary['seconds_per_question']:.2f} s per question"
        )
    counts = Counter(failure["left_out"] for failure in summary["left_out"])
    left_out = ", ".join(f"{count} {cause}" for cause, count in counts.items())
    for example in summary["left_out"][:1]:
        left_out += ", such as {id} ({video}): {reason}".format_map(example)
        yield f"  left out: {left_out}"
    broken = summary["broken_records"]
    for number, reason in list(broken.items())[:1]:
        yield f"  broken records: {len(broken)}, such as number {number}: {reason}"
    yield f"  {out / 'summary.json'}"
    if has_failed(summary):
        yield (
            f"error: more than {MOST_LEFT_OUT:.0%} of the questions were left out ({left_out}); "
            f"mend what {out / 'questions.csv'} lists, and give the same command again"
        )


def has_failed(summary: Line) -> bool:
    """Return whether a larger share of the questions was left out than `MOST_LEFT_OUT`."""
    left_out = len(summary["left_out"])
    return left_out > MOST_LEFT_OUT * (summary["n"] + left_out)


def table_of(lines: Sequence[Line]) -> str:
    """Return CSV with one line per question, which ends with the columns of your own."""
    own = list(dict.fromkeys(name for line in lines for name in line["columns"]))
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([*_TABLE, *(f"own {name}" if name in _TABLE else name for name in own)])
    for line in lines:
        fields = line | {"right": line.get("question", {}).get("answer")}
        writer.writerow([*map(fields.get, _TABLE), *map(line["columns"].get, own)])
    return text.getvalue()


def _points(score: float, interval: Sequence[float]) -> str:
    low, high = interval
    return f"{100 * score:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
