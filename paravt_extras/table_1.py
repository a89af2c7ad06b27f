"""Table 1 of the paper with finished evaluations below it, as Markdown.

A note says how the settings of each differ from the protocol behind the paper's numbers.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from paravt_extras.markdown import table, wrapped
from paravt_extras.published_scores import COLUMNS, MARKS, TABLE_1, Cell, mean_of_complete
from rollout.evaluation.benchmarks import title_of
from rollout.evaluation.folder import FolderError, Line, read_json
from rollout.evaluation.summary import counted, score_of

PUBLISHED: Mapping[str, Any] = {
    "k": 64,
    "dispatch": "frames",
    "temperature": 0.0,
    "protocol.tools": ["crop_video"],
    "protocol.max_tool_turns": 3,
    "protocol.max_calls": 5,
    "protocol.turn_tokens": 2048,
    "protocol.pin_think": False,
    "pixels": [602_112, 50_176],
}
"""How the release's evaluator plays: values of `BenchmarkSettings` as config.json holds them.

What its client and server do to frames is theirs: no times, JPEG, multiples of 28, native videos.
"""

PUBLISHED_CHARADES: Mapping[str, Any] = {"protocol.prompt": "agentic-minimal"}
"""What differs for Charades-STA."""


def differences(identity: Mapping[str, Any]) -> list[str]:
    """List the differences from the published protocol other than the wording, as phrases.

    Args:
        identity: the settings that affect answers, as config.json holds them.
    """
    published = dict(PUBLISHED)
    if identity["benchmark"] == "charades":
        published |= PUBLISHED_CHARADES
    return [
        f"{name} {identity[name]} instead of {wanted}"
        for name, wanted in published.items()
        if identity[name] != wanted
    ]


def table_1(folders: Sequence[pathlib.Path]) -> str:
    """Return the table with notes.

    Evaluations in one folder share a line of the table, under its name. Each score stands above the
    number of its questions, its interval and the calls per question.

    Args:
        folders: folders with a summary.json.

    Raises:
        FolderError: one has no summary, or two in one folder are of one split.
    """
    runs = _by_name(folders)
    others = (split for summaries in runs.values() for split in summaries)
    splits = list(dict.fromkeys([*COLUMNS, *others]))
    lines: list[list[str]] = []
    for group, models in itertools.groupby(TABLE_1, lambda model: model.group):
        lines.append([f"paper, {group}"])
        for model in models:
            average = mean_of_complete([*model.scores.values()])
            cells: list[Cell | None] = [model.scores.get(split) for split in splits]
            lines.append([model.name, *map(_cell, cells), _cell(average)])
    lines.append(["this project"])
    notes = [
        f"- Paper: {'; '.join(f'`{mark}` {meaning}' for mark, meaning in MARKS.items())}.",
        "- Averages are over the paper's seven splits; the paper prints two of them. Charades is "
        "mIoU. Other splits with several kinds of questions have the score of multiple choice.",
    ]
    for name, summaries in runs.items():
        lines += _run_lines(name, [summaries.get(split) for split in splits])
        notes += [_note(name, summary) for summary in summaries.values()]
    headings = ["per cent", *(COLUMNS.get(split) or title_of(split) for split in splits), "average"]
    return "\n".join([table(headings, lines), "", *map(wrapped, notes)])


def _by_name(folders: Sequence[pathlib.Path]) -> dict[str, dict[str, Line]]:
    """Return the summaries by the name of the folder around theirs, and by split."""
    runs: dict[str, dict[str, Line]] = {}
    for folder in folders:
        summary = read_json(folder / "summary.json")
        name = folder.resolve().parent.name
        summaries = runs.setdefault(name, {})
        if summary["benchmark"] in summaries:
            raise FolderError(
                f"--table: {folder} is another evaluation of {summary['benchmark']} in a folder "
                f"{name}; move it into one of its own, or leave it out"
            )
        summaries[summary["benchmark"]] = summary
    return runs


def _run_lines(name: str, summaries: Sequence[Line | None]) -> list[list[str]]:
    scores = [_per_cent(summary) for summary in summaries]
    asked = [summary is not None and _is_asked(summary) for summary in summaries[: len(COLUMNS)]]
    average = mean_of_complete(scores[: len(COLUMNS)]) if all(asked) else None
    lines = [[name, *map(_cell, scores), _cell(average)]]
    for title in ("questions", "95 % interval", "calls per question"):
        lines.append([f"· {title}", *(_detail(title, summary) for summary in summaries)])
    return lines


def _is_asked(summary: Line) -> bool:
    """Return whether every question of a split was asked; with `--limit`, some were not."""
    return summary["n"] + len(summary["left_out"]) >= summary["questions"]


def _per_cent(summary: Line | None) -> float | None:
    score = score_of(summary) if summary else None
    return None if score is None else 100 * score


def _cell(score: Cell | None) -> str:
    return f"{score:.1f}" if isinstance(score, int | float) else score or ""


def _detail(title: str, summary: Line | None) -> str:
    if summary is None or score_of(summary) is None:
        return ""
    if title == "questions":
        scored, records = counted(summary)
        return str(scored) if scored == records else f"{scored}/{records}"
    if title == "95 % interval":
        return "-".join(f"{100 * end:.1f}" for end in summary["interval"])
    return f"{summary['calls']:.2f}"


def _note(name: str, summary: Line) -> str:
    """Say how an evaluation differs from the published protocol, and what it was made with."""
    config = summary["config"]
    identity = config["identity"]
    # Adapters on a base have two hashes. A commit with uncommitted changes ends with "+".
    hashes = (identity["weights"] or "").split("+")
    weights = "+".join(each[:12] for each in hashes) or f"of {identity['endpoint']}"
    different = differences(identity) or ["the published protocol in our words"]
    commits = [str(commit) for commit in config["commits"]]
    shown = ", ".join(commit[:12] + "+" * commit.endswith("+") for commit in commits)
    made_with = f"weights {weights}, commit {shown}"
    return f"- {name}, {title_of(summary['benchmark'])}: {'; '.join([*different, made_with])}"
