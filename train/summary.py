"""Several finished runs in one table: `python -m train.summary runs/tiny-0 runs/tiny-1 ...` prints the README's figures as Markdown.

Owns the means over overview budgets and over runs. Reads `result.json` only; refuses a folder without one.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
from typing import Any

COLUMNS = {
    "accuracy before": ("before", "parallel", "accuracy", None),
    "accuracy after": ("after", "parallel", "accuracy", None),
    "f before": ("before", "parallel", "format", None),
    "f after": ("after", "parallel", "format", None),
    "kappa, smallest K": ("after", "parallel", "calls", min),
    "accuracy, smallest K": ("after", "parallel", "accuracy", min),
    "... without tools": ("after", "none", "accuracy", min),
    "turns": ("after", "parallel", "turns", None),
    "turns, sequential": ("after", "sequential", "turns", None),
    "accuracy, sequential": ("after", "sequential", "accuracy", None),
}


def figures(result: dict[str, Any]) -> dict[str, float]:
    """The columns of one run: rows of the highest temperature, averaged over K unless the column is about one K; minutes last."""
    hottest = max(row["temperature"] for row in result["after"])
    found = {}
    for name, (phase, dispatch, field, pick) in COLUMNS.items():
        rows = [
            row
            for row in result[phase]
            if row["dispatch"] == dispatch and row["temperature"] == hottest
        ]
        wanted = pick(row["k"] for row in rows) if pick else None
        found[name] = statistics.mean(row[field] for row in rows if wanted in (None, row["k"]))
    return found | {"minutes": result["seconds"] / 60}


def table(results: dict[str, dict[str, Any]]) -> str:
    """A Markdown table: one line a figure, one column a run, and mean and standard deviation over runs."""
    columns = {name: figures(result) for name, result in results.items()}
    lines = [f"| | {' | '.join(columns)} | mean ± std |", "|---" * (len(columns) + 2) + "|"]
    for name in next(iter(columns.values())):
        values = [column[name] for column in columns.values()]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        lines.append(
            f"| {name} | {' | '.join(f'{v:.2f}' for v in values)} | {statistics.mean(values):.2f} ± {spread:.2f} |"
        )
    for name in ("token_mismatches", "logprob_gap", "recompilations_after_warmup"):
        worst = max(result[name] for result in results.values())
        lines.append(
            f"| {name} | {' | '.join(f'{result[name]:.2g}' for result in results.values())} | at most {worst:.2g} |"
        )
    return "\n".join(lines)


def main(folders: list[str]) -> int:
    """The command's exit code."""
    results = {}
    for folder in folders:
        file = pathlib.Path(folder) / "result.json"
        if not file.exists():
            print(
                f"error: {file} does not exist; give the directories of finished runs",
                file=sys.stderr,
            )
            return 1
        results[pathlib.Path(folder).name] = json.loads(file.read_text())
    if not results:
        print(
            "error: no run directory given; usage: python -m train.summary RUN_DIR ...",
            file=sys.stderr,
        )
        return 2
    print(table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
