"""The table of finished evaluations beside table 1 of the paper, with notes on every number.

`contents` collects what is shown, which `--json` prints, and `text` formats it as Markdown. Runs
with the same `name` share a row; a second run of the same split starts a new one.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from paravt_extras.markdown import table as markdown
from paravt_extras.markdown import wrapped
from paravt_extras.published_protocol import differences
from paravt_extras.published_scores import COLUMNS, MARKS, TABLE_1, Cell, mean_of_complete
from rollout.evaluation.benchmarks import title_of
from rollout.evaluation.folder import FolderError, Line, read_json
from rollout.evaluation.summary import APART, not_played, rows_of, score_of, scored


@dataclasses.dataclass(frozen=True)
class Run:
    """The evaluations of one model: its summaries by split."""

    name: str
    summaries: dict[str, Line]


def contents(folders: Sequence[pathlib.Path]) -> dict[str, Any]:
    """Collect the table.

    Args:
        folders: folders with a summary.json.

    Returns:
        columns: the splits in order; the paper's seven come first.
        paper: rows of table 1: group, model, scores and average, and whether it is published.
        runs: rows of the folders. Per split: `score` and `interval` in per cent, `n`, `rows`,
            `left_out` by cause, `calls`, `unread`, `without_answer`, `grounding`, `open_ended`,
            `differences` from the published protocol, `wording`, `made_with`.

    Raises:
        FolderError: no folder is given, or one has no summary that this version can read.
    """
    runs = _grouped(folders)
    if not runs:
        raise FolderError("--table: no finished evaluation; give the folders of one or more")
    others = (split for run in runs for split in run.summaries)
    paper = [
        {
            "group": model.group,
            "model": model.name,
            "scores": dict(model.scores),
            "average": model.published_average or mean_of_complete([*model.scores.values()]),
            "average_published": model.published_average is not None,
        }
        for model in TABLE_1
    ]
    rows = []
    for run in runs:
        try:
            scores = {split: _entry(summary) for split, summary in run.summaries.items()}
        except KeyError as error:
            raise FolderError(
                f"{run.name}: summary.json has no {error}; an older version wrote it: play the "
                "questions again with another --out"
            ) from error
        rows.append({"name": run.name, "scores": scores, "average": _average(scores)})
    return {"columns": list(dict.fromkeys([*COLUMNS, *others])), "paper": paper, "runs": rows}


def _grouped(folders: Sequence[pathlib.Path]) -> list[Run]:
    """Return the summaries of the folders, by run."""
    runs: list[Run] = []
    for folder in folders:
        summary = read_json(folder / "summary.json")
        name = summary["config"].get("name", folder.name)
        split = summary["benchmark"]
        for run in runs:
            if run.name == name and split not in run.summaries:
                run.summaries[split] = summary
                break
        else:
            runs.append(Run(name, {split: summary}))
    return runs


def _entry(summary: Line) -> Line:
    """Return what the table says of one evaluation."""
    identity = summary["config"]["identity"]
    score = score_of(summary)
    entry: Line = {
        "score": None if score is None else 100 * score,
        "interval": None if score is None else [100 * end for end in summary["interval"]],
        "n": summary["n"],
        "rows": rows_of(summary),
        "left_out": not_played(summary),
        "differences": differences(identity),
        "wording": f"wording {identity['wording'][:12]} ({identity['protocol.prompt']})",
        "made_with": _made_with(summary["config"]),
    }
    counts = ("calls", "unread", "without_answer", "refused_reports")
    entry |= {name: summary[name] for name in counts if name in summary}
    scorings = {"grounding": "mIoU", "open_ended": identity.get("open_ended", "f1")}
    for field in filter(summary.__contains__, APART):
        found = summary[field]
        entry[field] = {
            "scoring": scorings[field],
            "score": 100 * found["score"],
            "interval": [100 * end for end in found["interval"]],
            "n": found["n"],
        }
    return entry


def _made_with(config: Line) -> str:
    """Return the weights and the code behind a score."""
    commits = ", ".join(_short(str(commit)) for commit in config["commits"])
    identity = config["identity"]
    weights = f"unknown ({identity.get('endpoint_model', 'a server')})"
    if identity["weights"]:
        weights = _short(identity["weights"])
    return f"weights {weights}, commit {commits}"


def _short(hashed: str) -> str:
    """Return the beginning of a hash, with the "+" of a commit whose files had changed."""
    return hashed[:12] + "+" * hashed[12:].endswith("+")


def _average(scores: dict[str, Line]) -> float | None:
    """Return the mean over the paper's splits in per cent; None if one lacks a score or is
    unfinished."""
    values: list[Cell | None] = []
    for split in COLUMNS:
        entry = scores.get(split)
        finished = entry is not None and "not_asked" not in entry["left_out"]
        values.append(entry["score"] if entry and finished else None)
    return mean_of_complete(values)


# --- as text ---


def text(table: dict[str, Any]) -> str:
    """Format `contents` as a Markdown table with notes."""
    columns = table["columns"]
    rows: list[list[str]] = []
    for group, models in itertools.groupby(table["paper"], lambda row: row["group"]):
        rows.append([f"paper, {group}"])
        rows += [_paper_row(model, columns) for model in models]
    rows.append(["this project"])
    marks = _Marks()
    for run in table["runs"]:
        rows += _run_rows(run, columns, marks)
    body = markdown(["per cent", *map(_heading, columns), "average"], rows)
    notes = [*_legend(table), *marks.notes(), "", *_provenance(table)]
    return "\n".join([body, "", *map(wrapped, notes)])


def _heading(split: str) -> str:
    return COLUMNS.get(split) or title_of(split)


def _paper_row(model: Line, columns: Sequence[str]) -> list[str]:
    cells = [_number(model["scores"].get(split, "")) for split in columns]
    how = "p" if model["average_published"] else "c"
    average = "" if model["average"] is None else f"{model['average']:.1f} ({how})"
    return [model["model"], *cells, average]


def _number(cell: Cell | str) -> str:
    return cell if isinstance(cell, str) else f"{cell:.1f}"


class _Marks:
    """Numbers the remarks on scores, such as [1]."""

    def __init__(self) -> None:
        self._remarks: list[str] = []

    def marked(self, cell: str, remark: str) -> str:
        """Return the cell with the mark of a remark; without, if the remark is empty."""
        if not remark:
            return cell
        self._remarks.append(remark)
        return f"{cell} [{len(self._remarks)}]"

    def notes(self) -> list[str]:
        return [f"- [{number}] {remark}" for number, remark in enumerate(self._remarks, 1)]


def _run_rows(run: Line, columns: Sequence[str], marks: _Marks) -> list[list[str]]:
    """Return a run's row of scores, and rows with the figures that belong to them."""
    entries = [run["scores"].get(split) for split in columns]
    scores = [
        entry and marks.marked(_one_digit(entry["score"]), _remark(run["name"], split, entry))
        for split, entry in zip(columns, entries, strict=True)
    ]
    average = "" if run["average"] is None else f"{run['average']:.1f} (c)"
    if average:
        parts = [split for split in COLUMNS if run["scores"][split]["left_out"]]
        headings = ", ".join(map(_heading, parts))
        remark = f"{run['name']}: average with incomplete {headings}" if parts else ""
        average = marks.marked(average, remark)
    figures: dict[str, Callable[[Line], str]] = {
        "questions": lambda entry: str(scored(entry)),
        "95 % interval": lambda entry: _interval(entry["interval"]),
        "unread answers": lambda entry: str(entry.get("unread", "")),
        "no answer": lambda entry: str(entry.get("without_answer", "")),
        "calls per question": lambda entry: f"{entry['calls']:.2f}" if "calls" in entry else "",
    }
    counts = set(figures) - {"questions", "95 % interval"}
    for field, kind in APART.items():
        for found in (entry[field] for entry in entries if entry and field in entry):
            figures[f"{kind} {found['scoring']}, {found['n']}"] = lambda entry, field=field: (
                _one_digit(entry[field]["score"]) if field in entry else ""
            )
            figures[f"95 % interval of {kind}"] = lambda entry, field=field: (
                _interval(entry[field]["interval"]) if field in entry else ""
            )
    rows = [[run["name"], *(score or "" for score in scores), average]]
    for title, show in figures.items():
        cells = [show(entry) if entry else "" for entry in entries]
        empty = {"", "0", "0.00"} if title in counts else {""}
        if not empty.issuperset(cells):
            rows.append([f"· {title}", *cells])
    return rows


def _one_digit(score: float | None) -> str:
    return "-" if score is None else f"{score:.1f}"


def _interval(ends: Sequence[float] | None) -> str:
    return f"{ends[0]:.1f}-{ends[1]:.1f}" if ends else ""


def _remark(run: str, split: str, entry: Line) -> str:
    """Why a score does not cover its split, or what went wrong; "" if nothing did."""
    remarks = []
    if entry["left_out"]:
        causes = (f"{count} {cause}" for cause, count in entry["left_out"].items())
        counted = f"{entry['n']} of {entry['rows']} questions"
        remarks.append(f"{counted}, left out: {', '.join(causes).replace('_', ' ')}")
    if entry.get("refused_reports"):
        remarks.append(f"{entry['refused_reports']} requests of sub-agents were refused")
    return f"{run}, {title_of(split)}: {'; '.join(remarks)}" if remarks else ""


# --- the notes ---


def _legend(table: dict[str, Any]) -> list[str]:
    marks = "; ".join(f"`{mark}` {meaning}" for mark, meaning in MARKS.items())
    lines = [
        f"- Paper: {marks}. It gives no intervals.",
        "- Averages: (p) published, (c) computed here. Incomplete rows have none.",
        "- Charades is mIoU. MMVU is multiple choice. Other kinds have lines of their own.",
        "- Unread answers name no option or span. Like questions without an answer, they score 0.",
        "- Rows of counts that are 0 everywhere are left out.",
    ]
    return lines


def _provenance(table: dict[str, Any]) -> list[str]:
    """For each run: how it differs from the published protocol, and what it was made with."""
    lines = ["How the runs differ from the protocol behind the paper's numbers:"]
    for run in table["runs"]:
        for note, splits in _alike(run["scores"]).items():
            lines.append(f"- {run['name']} ({', '.join(map(_heading, splits))}): {note}")
    return lines


def _alike(scores: dict[str, Line]) -> dict[str, list[str]]:
    """Return splits by their note, so that equal notes are printed once."""
    found: dict[str, list[str]] = {}
    for split, entry in scores.items():
        different = entry["differences"] or ["no other difference"]
        note = "; ".join([entry["wording"], *different, entry["made_with"]])
        found.setdefault(note, []).append(split)
    return found
