"""Compares two evaluations question by question, and tabulates runs beside the paper's results.

A comparison covers the questions that both runs played. A grounding answer counts as right if its
overlap is at least `RIGHT`.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rollout.evaluation.benchmarks import BENCHMARKS, title_of
from rollout.evaluation.folder import FolderError, Line, latest, read_json, read_lines
from rollout.evaluation.statistics import interval_of_difference, mcnemar
from rollout.evaluation.summary import not_played, read_summary, rows_of, score_of

RIGHT = 0.5
"""A question with at least this score counts as right."""

FEW_VIDEOS = 10
"""With differences on fewer videos than this, the comparison carries a warning."""

SHOWN = 10
"""Number of question ids that the text of a comparison lists per run."""

_COUNTED = {
    "without_answer": "without an answer",
    "unread": "whose answer names no option or span",
    "refused_reports": "requests of sub-agents refused",
}
"""Counts of a summary that the notes below the table mention, with their wording."""


# --- two runs ---


def compare(first: pathlib.Path, second: pathlib.Path) -> dict[str, Any]:
    """Compare two runs of the same split question by question.

    Args:
        first: the folder of run A.
        second: the folder of run B.

    Returns:
        The content of `--compare --json`: the counts of the four outcomes, the scores on the shared
        questions, their difference B - A with a 95 % interval, the numbers of videos and of videos
        on which scores differ, McNemar's p-value, the settings that differ, and the ids of the
        questions that only one run got right.

    Raises:
        ValueError: the runs are of different splits, or share no question.
        FolderError: a folder holds no evaluation.
    """
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

    # Both runs' scores on the same questions, in the same order, so that differences are paired.
    scores_a = np.array([played_a[id]["score"] for id in shared])
    scores_b = np.array([played_b[id]["score"] for id in shared])
    videos = [played_a[id]["video"] for id in shared]
    gains = scores_b - scores_a
    low, high = interval_of_difference(gains.tolist(), videos)
    differing = {video for video, gain in zip(videos, gains, strict=True) if gain}
    right_a = scores_a >= RIGHT
    right_b = scores_b >= RIGHT
    only_a = [id for id, only in zip(shared, right_a & ~right_b, strict=True) if only]
    only_b = [id for id, only in zip(shared, right_b & ~right_a, strict=True) if only]
    return {
        "benchmark": names[0],
        "made_with": _differing(*identities),
        "questions": len(shared),
        "not_shared": len(played_a.keys() ^ played_b.keys()),
        "left_out": [_left_out(lines) for lines in (lines_a, lines_b)],
        "scores": [float(np.mean(scores)) for scores in (scores_a, scores_b)],
        "difference": float(gains.mean()),
        "interval": [low, high],
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
    low, high = found["interval"]
    score_a, score_b = found["scores"]
    lines = [
        f"{title_of(found['benchmark'])}: {found['questions']} questions played by both "
        f"({found['not_shared']} by only one)",
        f"  A {first}: {100 * score_a:.1f}",
        f"  B {second}: {100 * score_b:.1f}",
        f"  B - A: {100 * found['difference']:+.1f}, "
        f"95 % interval [{100 * low:+.1f}, {100 * high:+.1f}] (by video)",
        f"  both right {found['both_right']}, only A {found['only_first']}, "
        f"only B {found['only_second']}, neither {found['both_wrong']}; "
        f"McNemar, exact, two-sided: p = {found['mcnemar_p']:.3g}",
    ]
    if found["differing_videos"] < FEW_VIDEOS:
        lines.append(
            f"  warning: scores differ on {found['differing_videos']} of {found['videos']} videos; "
            f"with fewer than {FEW_VIDEOS}, the interval is only a rough guide"
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


def _some_of(ids: Sequence[str]) -> str:
    if not ids:
        return "none"
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    return ", ".join(ids[:SHOWN]) + more


# --- the table of many runs ---

Row = tuple[str, dict[str, Line]]
"""A run's name and its summaries, by benchmark."""


def table(folders: Sequence[pathlib.Path]) -> str:
    """Make a markdown table of runs beside the paper's results, with notes below it.

    Runs with the same `name` share a row; a second run of the same split starts a new one.

    Args:
        folders: folders with a summary.json.

    Raises:
        FolderError: no folder is given, or one has no summary that this version can read.
    """
    rows = _grouped(folders)
    if not rows:
        raise FolderError("--table: no finished evaluation; give the folders of one or more")
    published = {name: benchmark.paper for name, benchmark in BENCHMARKS.items() if benchmark.paper}
    # The paper's splits come first, in the paper's order.
    others = (name for _, summaries in rows for name in summaries)
    columns = list(dict.fromkeys([*published, *others]))
    lines = [
        _row("per cent", [title_of(name) for name in columns]),
        _row("---", ["---:"] * len(columns)),
    ]
    models = dict.fromkeys(model for scores in published.values() for model in scores)
    for model in models:
        scores = [published.get(name, {}).get(model) for name in columns]
        cells = ["-" if score is None else f"{score:.1f}" for score in scores]
        lines.append(_row(f"{model} (paper)", cells))
    for label, summaries in rows:
        found = [summaries.get(name) for name in columns]
        lines.append(_row(label, map(_score_cell, found)))
        lines.append(_row(f"{label}: calls per question", map(_calls_cell, found)))
    return "\n".join([*lines, "", *_notes(rows)])


def _grouped(folders: Sequence[pathlib.Path]) -> list[Row]:
    """The summaries of the folders, as rows of the table."""
    rows: list[Row] = []
    for folder in folders:
        summary = read_summary(folder)
        name = summary["config"].get("name", folder.name)
        benchmark = summary["benchmark"]
        for label, summaries in rows:
            if label == name and benchmark not in summaries:
                summaries[benchmark] = summary
                break
        else:
            rows.append((name, {benchmark: summary}))
    return rows


def _row(label: str, cells: Iterable[str]) -> str:
    return f"| {label} | " + " | ".join(cells) + " |"


def _score_cell(summary: Line | None) -> str:
    score = None if summary is None else score_of(summary)
    if summary is None or score is None:
        return "-"
    low, high = summary["interval"]
    mark = "*" if not_played(summary) else ""
    return f"{100 * score:.1f}{mark} [{100 * low:.1f}, {100 * high:.1f}]"


def _calls_cell(summary: Line | None) -> str:
    if summary is None or "calls" not in summary:
        return "-"
    return f"{summary['calls']:.2f}"


def _notes(rows: Sequence[Row]) -> list[str]:
    """The notes below the table: the questions behind each score, and its settings."""
    notes = [
        "In brackets: 95 % intervals. \\*: some rows of the split were left out; "
        "the run's note names the causes.",
        "The paper's results were measured with other frame sizes, prompts and times than this "
        "project's. They are listed for orientation only: a difference from them means nothing.",
    ]
    for label, summaries in rows:
        for name, summary in summaries.items():
            notes.append(f"- {label}, {name}: {_counts(summary)}, {_made_with(summary)}")
    return notes


def _counts(summary: Line) -> str:
    """The number of questions behind a score, why others are missing, and unreadable answers."""
    causes = not_played(summary)
    text = f"{summary['n']} of {rows_of(summary)} questions"
    if causes:
        counts = ", ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in causes.items())
        text += f" (\\* left out: {counts})"
    if "open_ended" in summary:
        found = summary["open_ended"]
        low, high = found["interval"]
        scoring = summary["config"]["identity"].get("open_ended", "f1")
        text += (
            f", of which {found['n']} open-ended are not in the score "
            f"({scoring} {100 * found['score']:.1f} [{100 * low:.1f}, {100 * high:.1f}])"
        )
    for name, words in _COUNTED.items():
        if summary.get(name):
            text += f", {summary[name]} {words}"
    return text


def _made_with(summary: Line) -> str:
    """The settings, weights and commits behind a score."""
    config = summary["config"]
    identity = config["identity"]
    temperature = identity["temperature"]
    settings = [
        f"K = {identity['frames']}",
        f"dispatch {identity['dispatch']}",
        f"prompt {identity['prompt']}",
        "greedy" if temperature == 0 else f"temperature {temperature:g}",
    ]
    if identity["blind"]:
        settings.append("blind")
    if identity["shuffle"]:
        settings.append("shuffled")
    commits = ", ".join(str(commit) for commit in config["commits"])
    weights = identity["weights"] or "unknown"
    return f"{', '.join(settings)}; weights {weights}, commit {commits}"
