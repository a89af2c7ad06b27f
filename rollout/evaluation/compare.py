"""Compares two evaluations question by question.

A comparison covers the questions that both runs played. A grounding answer counts as right if its
overlap is at least `RIGHT`.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from paravt_jax.method.records import QuestionKind
from rollout.evaluation.benchmarks import title_of
from rollout.evaluation.folder import Line, latest, read_json, read_lines
from rollout.evaluation.statistics import interval_of_difference, mcnemar

RIGHT = 0.5
"""A question with at least this score counts as right."""

FEW_VIDEOS = 10
"""With differences on fewer videos than this, the comparison carries a warning."""

SHOWN = 10
"""Number of question ids that the text of a comparison lists per run."""


def compare(first: pathlib.Path, second: pathlib.Path) -> dict[str, Any]:
    """Compare two runs of the same split question by question.

    Args:
        first: the folder of run A.
        second: the folder of run B.

    Returns:
        The content of `--compare --json`: the counts of the four outcomes, the scores on the shared
        questions, their difference B - A with a 95 % interval, the numbers of videos and of videos
        on which scores differ, McNemar's p-value, the settings that differ, and the ids of the
        questions that only one run got right. Open-ended questions are left to `open_ended`, which
        has the same figures, unless there are no others.

    Raises:
        ValueError: the runs are one and the same, are of different splits, or share no question.
        FolderError: a folder holds no evaluation, or a damaged one.
    """
    if first.resolve() == second.resolve():
        raise ValueError(f"--compare: {first} is given twice; give the folders of two runs")
    identities = [read_json(folder / "config.json")["identity"] for folder in (first, second)]
    names = [identity["benchmark"] for identity in identities]
    if names[0] != names[1]:
        raise ValueError(
            f"--compare: {first} is {names[0]}, {second} is {names[1]}; compare runs of one split"
        )
    lines_a, lines_b = (latest(read_lines(folder)) for folder in (first, second))
    played_a, played_b = (_played(lines) for lines in (lines_a, lines_b))
    shared = sorted(played_a.keys() & played_b.keys())
    if not shared:
        raise ValueError(
            f"--compare: {first} and {second} have no question in common; "
            "play the same questions with both"
        )

    # A mean of their F1 and the 0 or 1 of multiple choice would be meaningless.
    opened = [id for id in shared if played_a[id]["kind"] == QuestionKind.OPEN_ENDED]
    closed = [id for id in shared if id not in set(opened)]
    found: dict[str, Any] = {
        "benchmark": names[0],
        "made_with": _differing(*identities),
        "not_shared": len(played_a.keys() ^ played_b.keys()),
        "left_out": [_left_out(lines) for lines in (lines_a, lines_b)],
        **_paired(closed or opened, played_a, played_b),
    }
    if closed and opened:
        found["open_ended"] = _paired(opened, played_a, played_b)
    return found


def _paired(
    ids: Sequence[str], played_a: dict[str, Line], played_b: dict[str, Line]
) -> dict[str, Any]:
    """Compare the scores of both runs on the same questions."""
    # In the same order, so that differences are paired.
    scores_a = np.array([played_a[id]["score"] for id in ids])
    scores_b = np.array([played_b[id]["score"] for id in ids])
    videos = [played_a[id]["video"] for id in ids]
    gains = scores_b - scores_a
    differing = {video for video, gain in zip(videos, gains, strict=True) if gain}
    right_a = scores_a >= RIGHT
    right_b = scores_b >= RIGHT
    only_a = [id for id, only in zip(ids, right_a & ~right_b, strict=True) if only]
    only_b = [id for id, only in zip(ids, right_b & ~right_a, strict=True) if only]
    return {
        "questions": len(ids),
        "scores": [float(np.mean(scores)) for scores in (scores_a, scores_b)],
        "difference": float(gains.mean()),
        "interval": list(interval_of_difference(gains.tolist(), videos)),
        "videos": len(set(videos)),
        "differing_videos": len(differing),
        "both_right": int((right_a & right_b).sum()),
        "only_first": len(only_a),
        "only_second": len(only_b),
        "both_wrong": int((~right_a & ~right_b).sum()),
        "mcnemar_p": mcnemar(len(only_a), len(only_b)),
        "only_first_ids": only_a,
        "only_second_ids": only_b,
    }


def _played(lines: dict[str, Line]) -> dict[str, Line]:
    return {id: line for id, line in lines.items() if "left_out" not in line}


def _left_out(lines: dict[str, Line]) -> dict[str, int]:
    """Number of questions left out, by cause."""
    causes = [line["left_out"] for line in lines.values() if "left_out" in line]
    return dict(sorted(collections.Counter(causes).items()))


def _differing(first: Line, second: Line) -> dict[str, list[Any]]:
    """The fields of two identities that differ, each with both values."""
    pairs = {name: [first.get(name), second.get(name)] for name in first | second}
    return {name: values for name, values in pairs.items() if values[0] != values[1]}


def comparison_text(first: pathlib.Path, second: pathlib.Path, found: dict[str, Any]) -> str:
    """Format the result of `compare` as text."""
    score_a, score_b = found["scores"]
    lines = [
        f"{title_of(found['benchmark'])}: {found['questions']} questions played by both "
        f"({found['not_shared']} by only one)",
        f"  A {first}: {100 * score_a:.1f}",
        f"  B {second}: {100 * score_b:.1f}",
        f"  B - A: {_difference(found)}",
        f"  both right {found['both_right']}, only A {found['only_first']}, "
        f"only B {found['only_second']}, neither {found['both_wrong']}; "
        f"McNemar, exact, two-sided: p = {found['mcnemar_p']:.3g}",
    ]
    if found["differing_videos"] < FEW_VIDEOS:
        lines.append(
            f"  warning: scores differ on {found['differing_videos']} of {found['videos']} videos; "
            f"with fewer than {FEW_VIDEOS}, the interval is only a rough guide"
        )
    if "open_ended" in found:
        opened = found["open_ended"]
        score_a, score_b = (100 * score for score in opened["scores"])
        lines.append(
            f"  {opened['questions']} open-ended questions apart: A {score_a:.1f}, "
            f"B {score_b:.1f}, B - A: {_difference(opened)}"
        )
    for run, causes in zip("AB", found["left_out"], strict=True):
        if causes:
            counts = ", ".join(f"{count} {cause}" for cause, count in causes.items())
            lines.append(f"  {run} left out: {counts.replace('_', ' ')}")
    if found["made_with"]:
        differing = (f"{name} A {a!r}, B {b!r}" for name, (a, b) in found["made_with"].items())
        lines.append(f"  made with: {'; '.join(differing)}")
    for run, name in (("A", "first"), ("B", "second")):
        lines.append(f"  only {run}: {_some_of(found[f'only_{name}_ids'])}")
    return "\n".join(lines)


def _difference(found: dict[str, Any]) -> str:
    """The difference and its interval, in points."""
    low, high = (100 * end for end in found["interval"])
    gain = 100 * found["difference"]
    digits = 2 if high - low < 1 else 1
    interval = f"[{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"{gain:+.{digits}f}, 95 % interval {interval} points (clustered by video)"


def _some_of(ids: Sequence[str]) -> str:
    if not ids:
        return "none"
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    return ", ".join(ids[:SHOWN]) + more
