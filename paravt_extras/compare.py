"""Compares two evaluations question by question.

A comparison covers the questions that both runs played, each kind by itself: a mean over several
kinds would be meaningless. Questions of one id are compared only if they are the same questions
about the same videos. A grounding answer counts as right if its overlap is at least `RIGHT`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from paravt_extras.markdown import table, wrapped
from paravt_jax.method.records import QuestionKind
from rollout.evaluation.benchmarks import title_of
from rollout.evaluation.folder import Line, latest, read_json, read_lines
from rollout.evaluation.statistics import interval_of_difference, mcnemar

RIGHT = 0.5
"""A question with at least this score counts as right."""

FEW_VIDEOS = 10
"""With differences on fewer videos than this, the interval is only a rough guide."""

KINDS = {
    QuestionKind.MULTIPLE_CHOICE: "multiple choice",
    QuestionKind.TEMPORAL_GROUNDING: "grounding",
    QuestionKind.OPEN_ENDED: "open-ended",
}
"""Kinds of questions by their names, in the order in which a comparison shows them."""


def compare(first: pathlib.Path, second: pathlib.Path) -> dict[str, Any]:
    """Compare two runs of the same split question by question.

    Args:
        first: the folder of run A.
        second: the folder of run B.

    Returns:
        The content of `--compare --json`: the settings that differ, the number of questions that
        only one run played, and for each kind of question the scores, their difference B - A with
        a 95 % interval, the counts of the four outcomes, McNemar's p-value, and the ids of the
        questions that only one run got right.

    Raises:
        ValueError: the runs are one and the same, are of different splits, or share no question.
        FolderError: a folder holds no evaluation, or a damaged one.
    """
    if first.resolve() == second.resolve():
        raise ValueError(f"--compare: {first} is given twice; give the folders of two runs")
    identity_a, identity_b = (
        read_json(folder / "config.json")["identity"] for folder in (first, second)
    )
    benchmark = identity_a["benchmark"]
    if benchmark != identity_b["benchmark"]:
        raise ValueError(
            f"--compare: {first} is {benchmark}, {second} is {identity_b['benchmark']}; "
            "compare runs of one split"
        )
    played_a, played_b = _played(first), _played(second)
    shared = sorted(played_a.keys() & played_b.keys())
    kinds = {
        str(kind): [key for key in shared if played_a[key]["kind"] == kind]
        for kind in KINDS
        # Every judge is a measure of its own.
        if kind != QuestionKind.OPEN_ENDED or identity_a["judge"] == identity_b["judge"]
    }
    if not any(kinds.values()):
        raise ValueError(
            f"--compare: {first} and {second} have no question in common; play the same questions "
            "with both, with the same judge"
        )
    return {
        "benchmark": benchmark,
        "made_with": {
            name: [identity_a.get(name), identity_b.get(name)]
            for name in identity_a | identity_b
            if identity_a.get(name) != identity_b.get(name)
        },
        "not_shared": len(played_a.keys() ^ played_b.keys()),
        "kinds": {
            kind: _paired([played_a[key] for key in keys], [played_b[key] for key in keys])
            for kind, keys in kinds.items()
            if keys
        },
    }


def _played(folder: pathlib.Path) -> dict[str, Line]:
    """Return the lines of the questions that were played, by the hash of what was asked."""
    contents = set(read_json(folder / "config.json")["questions"])
    return {
        content: line
        for content, line in latest(read_lines(folder)).items()
        if content in contents and "left_out" not in line
    }


def _paired(lines_a: Sequence[Line], lines_b: Sequence[Line]) -> dict[str, Any]:
    """Compare the scores of both runs on the same questions, in the same order."""
    scores_a, scores_b = (
        np.array([line["score"] for line in lines]) for lines in (lines_a, lines_b)
    )
    videos = [line["video"] for line in lines_a]
    ids = np.array([line["id"] for line in lines_a])
    gains = scores_b - scores_a
    right_a, right_b = scores_a >= RIGHT, scores_b >= RIGHT
    only_a, only_b = ids[right_a & ~right_b].tolist(), ids[right_b & ~right_a].tolist()
    return {
        "questions": len(ids),
        "scores": [float(scores_a.mean()), float(scores_b.mean())],
        "difference": float(gains.mean()),
        "interval": list(interval_of_difference(gains.tolist(), videos)),
        "videos": len(set(videos)),
        "differing_videos": len(set(np.array(videos)[gains != 0])),
        "both_right": int((right_a & right_b).sum()),
        "only_first": len(only_a),
        "only_second": len(only_b),
        "both_wrong": int((~right_a & ~right_b).sum()),
        "mcnemar_p": mcnemar(len(only_a), len(only_b)),
        "only_first_ids": only_a,
        "only_second_ids": only_b,
    }


def comparison_text(first: pathlib.Path, second: pathlib.Path, comparison: dict[str, Any]) -> str:
    """Format the result of `compare` as text."""
    kinds = comparison["kinds"]
    count = sum(figures["questions"] for figures in kinds.values())
    headings = ["", "questions", "A", "B", "B - A", "95 % interval"]
    headings += ["both right", "only A", "only B", "neither", "McNemar p"]
    notes = [
        f"- A is {first}, B is {second}. Scores are in per cent; intervals are clustered by video."
    ]
    notes += [
        f"- warning: scores of {KINDS[kind]} differ on {figures['differing_videos']} of "
        f"{figures['videos']} videos; the interval is only a rough guide"
        for kind, figures in kinds.items()
        if figures["differing_videos"] < FEW_VIDEOS
    ]
    notes += [f"- {name}: A {a!r}, B {b!r}" for name, (a, b) in comparison["made_with"].items()]
    played = f"{count} questions played by both ({comparison['not_shared']} by only one)"
    lines = [f"{title_of(comparison['benchmark'])}: {played}", ""]
    cells = [_cells(KINDS[kind], figures) for kind, figures in kinds.items()]
    return "\n".join([*lines, table(headings, cells), "", *map(wrapped, notes)])


def _cells(kind: str, figures: dict[str, Any]) -> list[str]:
    low, high = (100 * end for end in figures["interval"])
    digits = 2 if high - low < 1 else 1
    outcomes = ("both_right", "only_first", "only_second", "both_wrong")
    return [
        kind,
        str(figures["questions"]),
        *(f"{100 * score:.1f}" for score in figures["scores"]),
        f"{100 * figures['difference']:+.{digits}f}",
        f"{low:+.{digits}f} to {high:+.{digits}f}",
        *(str(figures[outcome]) for outcome in outcomes),
        f"{figures['mcnemar_p']:.3g}",
    ]
