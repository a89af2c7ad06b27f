"""Compares finished runs in a Markdown table, read from each run's `result.json`.

python -m train.summary runs/tiny-0 runs/tiny-1 ...
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
from collections.abc import Iterable
from typing import Any

# Line of the table: (phase, dispatch, field of a result row, choice of the overview budget K).
# None averages over all budgets, `min` takes the smallest.
LINES = {
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
    """Return the figures of one run by name, in the order of the table.

    Only the highest sampling temperature counts: greedy episodes are a check, not the result.

    Args:
        result: Contents of the run's `result.json`.
    """
    temperature = max(row["temperature"] for row in result["after"])
    values = {}
    for name, (phase, dispatch, field, choose) in LINES.items():
        rows = [
            row
            for row in result[phase]
            if row["dispatch"] == dispatch and row["temperature"] == temperature
        ]
        if choose is not None:
            budget = choose(row["k"] for row in rows)
            rows = [row for row in rows if row["k"] == budget]
        values[name] = statistics.mean(row[field] for row in rows)
    values["minutes"] = result["seconds"] / 60
    return values


def table(results: dict[str, dict[str, Any]]) -> str:
    """Format runs as a Markdown table, with a column per run and a line per figure.

    The last column has mean and standard deviation over the runs; for checks, the largest value.

    Args:
        results: Contents of each run's `result.json`, by the name of the run.
    """
    runs = {name: figures(result) for name, result in results.items()}
    lines = [f"| | {' | '.join(runs)} | mean ± std |", "|---" * (len(runs) + 2) + "|"]
    for name in next(iter(runs.values())):
        values = [figures_of_run[name] for figures_of_run in runs.values()]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        average = f"{statistics.mean(values):.2f} ± {spread:.2f}"
        lines.append(_line(name, [f"{value:.2f}" for value in values], average))
    for name in ("token_mismatches", "logprob_gap", "recompilations_after_warmup"):
        values = [result[name] for result in results.values()]
        lines.append(
            _line(name, [f"{value:.2g}" for value in values], f"at most {max(values):.2g}")
        )
    return "\n".join(lines)


def _line(name: str, cells: Iterable[str], last: str) -> str:
    return f"| {' | '.join([name, *cells, last])} |"


def main(folders: list[str]) -> int:
    """Run the command; returns its exit code."""
    results = {}
    for folder in folders:
        file = pathlib.Path(folder) / "result.json"
        if not file.exists():
            print(
                f"error: {file} does not exist; give the folders of finished runs",
                file=sys.stderr,
            )
            return 1
        results[pathlib.Path(folder).name] = json.loads(file.read_text())
    if not results:
        print(
            "error: no folder given; usage: python -m train.summary RUN_DIR ...",
            file=sys.stderr,
        )
        return 2
    print(table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
