"""Two evaluations question by question, and many in one table beside the paper's rows.

Owns what is compared: the questions that both played, by id. A question of grounding counts as right from an overlap of 0.5 on. Refuses
runs of different splits. Invariant: nothing here changes a file.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rollout.evaluation.benchmarks import BENCHMARKS, title_of
from rollout.evaluation.folder import FolderError, Line, latest, read_json, read_lines
from rollout.evaluation.statistics import interval, mcnemar
from rollout.evaluation.summary import not_played, read_summary, rows_of, score_of

RIGHT = 0.5  # a score from which on a question counts as right
# Counts of a summary that a note names, in words.
_COUNTED = {
    "without_answer": "without an answer",
    "unread": "whose answer names no option or span",
    "refused_reports": "sub-agents' requests refused",
}
SHOWN = 10  # questions that are named on either side


def compare(first: pathlib.Path, second: pathlib.Path) -> dict[str, Any]:
    """Who was right where. ValueError for runs of different splits, and where they share no question."""
    left, right = (read_json(folder / "config.json")["identity"] for folder in (first, second))
    names = [left["benchmark"], right["benchmark"]]
    if names[0] != names[1]:
        raise ValueError(
            f"--compare: {first} is {names[0]}, {second} is {names[1]}; compare runs of one split"
        )
    a, b = (_played(folder) for folder in (first, second))
    left_out = [_left_out(folder) for folder in (first, second)]
    both = sorted(a.keys() & b.keys())
    if not both:
        raise ValueError(
            f"--compare: {first} and {second} have no question in common; let them play the same ones"
        )
    cells = {
        (one, other): [id for id in both if (_right(a[id]), _right(b[id])) == (one, other)]
        for one in (True, False)
        for other in (True, False)
    }
    gains = np.array([b[id]["score"] - a[id]["score"] for id in both])
    # A difference lies in [-1, 1]: halved and moved to [0, 1], where the interval of a mean is known.
    low, high = interval(((gains + 1) / 2).tolist(), [a[id]["video"] for id in both])
    return {
        "benchmark": names[0],
        "made_with": {
            name: [left.get(name), right.get(name)]
            for name in left | right
            if left.get(name) != right.get(name)
        },
        "questions": len(both),
        "not_shared": len(a.keys() ^ b.keys()),
        "left_out": left_out,
        "scores": [float(np.mean([run[id]["score"] for id in both])) for run in (a, b)],
        "difference": float(gains.mean()),
        "interval": [2 * low - 1, 2 * high - 1],
        "both_right": len(cells[True, True]),
        "only_first": len(cells[True, False]),
        "only_second": len(cells[False, True]),
        "both_wrong": len(cells[False, False]),
        "mcnemar_p": mcnemar(len(cells[True, False]), len(cells[False, True])),
        "only_first_ids": cells[True, False],
        "only_second_ids": cells[False, True],
    }


def _played(folder: pathlib.Path) -> dict[str, Line]:
    return {id: line for id, line in latest(read_lines(folder)).items() if "left_out" not in line}


def _left_out(folder: pathlib.Path) -> dict[str, int]:
    causes = [
        line["left_out"] for line in latest(read_lines(folder)).values() if "left_out" in line
    ]
    return dict(sorted(collections.Counter(causes).items()))


def _right(line: Line) -> bool:
    return line["score"] >= RIGHT


def comparison_text(first: pathlib.Path, second: pathlib.Path, found: dict[str, Any]) -> str:
    """A comparison as people read it."""
    (low, high), p = found["interval"], found["mcnemar_p"]
    lines = [
        f"{title_of(found['benchmark'])}: {found['questions']} questions that both played ({found['not_shared']} that one did)",
        f"  A {first}: {100 * found['scores'][0]:.1f}",
        f"  B {second}: {100 * found['scores'][1]:.1f}",
        f"  B - A: {100 * found['difference']:+.1f}, 95 % interval [{100 * low:+.1f}, {100 * high:+.1f}] (by video)",
        f"  both right {found['both_right']}, only A {found['only_first']}, only B {found['only_second']}, "
        f"neither {found['both_wrong']}; McNemar, exact, two-sided: p = {p:.3g}",
    ]
    for name, causes in zip("AB", found["left_out"], strict=True):
        if causes:
            named = ", ".join(f"{count} {cause}" for cause, count in causes.items())
            lines.append(f"  {name} left out: {named.replace('_', ' ')}")
    if found["made_with"]:
        differing = (
            f"{name} A {values[0]!r}, B {values[1]!r}"
            for name, values in found["made_with"].items()
        )
        lines.append(f"  made with: {'; '.join(differing)}")
    for name in ("first", "second"):
        ids = found[f"only_{name}_ids"]
        more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
        lines.append(
            f"  only {'A' if name == 'first' else 'B'}: {', '.join(ids[:SHOWN]) or 'none'}{more}"
        )
    return "\n".join(lines)


def table(folders: Sequence[pathlib.Path]) -> str:
    """A markdown table of runs (their summaries) beside the paper's rows.

    Runs of one `name` share a row; a split that is there twice opens another.
    """
    rows: list[tuple[str, dict[str, Line]]] = []
    for folder in folders:
        summary = read_summary(folder)
        name, benchmark = summary["config"].get("name", folder.name), summary["benchmark"]
        row = next(
            (cells for label, cells in rows if label == name and benchmark not in cells), None
        )
        if row is None:
            rows.append((name, row := {}))
        row[benchmark] = summary
    if not rows:
        raise FolderError("--table: names no evaluation; give the folders of one or more")
    published = {name: benchmark.paper for name, benchmark in BENCHMARKS.items() if benchmark.paper}
    played = (name for _, cells in rows for name in cells)
    columns = list(dict.fromkeys([*published, *played]))
    titles = [title_of(name) for name in columns]
    body = []
    for model in dict.fromkeys(model for paper in published.values() for model in paper):
        numbers = [published.get(name, {}).get(model) for name in columns]
        body.append(_row(f"{model} (paper)", ["-" if n is None else f"{n:.1f}" for n in numbers]))
    for label, cells in rows:
        body.append(_row(label, [_cell(cells.get(name)) for name in columns]))
        body.append(
            _row(f"{label}: calls per question", [_calls(cells.get(name)) for name in columns])
        )
    return "\n".join(
        [_row("per cent", titles), _row("---", ["---:"] * len(titles)), *body, "", *_notes(rows)]
    )


def _row(label: str, cells: Iterable[str]) -> str:
    return f"| {label} | " + " | ".join(cells) + " |"


def _cell(summary: Line | None) -> str:
    if summary is None or (score := score_of(summary)) is None:
        return "-"
    low, high = summary["interval"]
    part = "*" if not_played(summary) else ""
    return f"{100 * score:.1f}{part} [{100 * low:.1f}, {100 * high:.1f}]"


def _calls(summary: Line | None) -> str:
    return "-" if summary is None or "calls" not in summary else f"{summary['calls']:.2f}"


def _notes(rows: Sequence[tuple[str, dict[str, Line]]]) -> list[str]:
    """Under the table: what each number was made with."""
    notes = [
        "In brackets: 95 % intervals. \\*: rows of the split were left out, as said below.",
        "The paper's rows were measured with other frame sizes, prompts and times than this project's: "
        "they stand here for orientation, and a difference from them shows nothing.",
    ]
    for label, cells in rows:
        for name, summary in cells.items():
            config = summary["config"]
            identity = config["identity"]
            notes.append(
                f"- {label}, {name}: {_counts(summary)}, K = {identity['frames']}, "
                f"dispatch {identity['dispatch']}, prompt {identity['prompt']}, "
                f"{'greedy' if identity['temperature'] == 0 else 'temperature ' + format(identity['temperature'], 'g')}"
                f"{', blind' if identity['blind'] else ''}{', shuffled' if identity['shuffle'] else ''}; "
                f"weights {identity['weights'] or 'unknown'}, commit {', '.join(str(commit) for commit in config['commits'])}"
            )
    return notes


def _counts(summary: Line) -> str:
    """How many rows a score is about, what became of the others, and what was not read."""
    causes = not_played(summary)
    text = f"{summary['n']} of {rows_of(summary)} questions"
    if causes:
        named = ", ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in causes.items())
        text += f" (\\* left out: {named})"
    if found := summary.get("open_ended"):
        low, high = found["interval"]
        scored = summary["config"]["identity"].get("open_ended", "f1")
        text += (
            f", of which {found['n']} open-ended are not in the score "
            f"({scored} {100 * found['score']:.1f} [{100 * low:.1f}, {100 * high:.1f}])"
        )
    for name, said in _COUNTED.items():
        if summary.get(name):
            text += f", {summary[name]} {said}"
    return text
