"""Compares finished runs in a Markdown table, read from each run's `result.json`.

python -m paravt_extras.summary runs/tiny-0 runs/tiny-1 ...     # each run's figures, and their mean
python -m paravt_extras.summary --table-2 runs/paravt_8b ...    # beside table 2 of the paper
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any, Literal

from paravt_extras.markdown import table_of_figures
from paravt_extras.report.result import read_result
from paravt_extras.table_2 import read_run, text
from paravt_jax.processes.exit_codes import USER_ERRORS
from train.durable.run_directory import read_config

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the table: the mean of one figure over K."""

    name: str
    phase: Literal["before", "after"]
    field: str = "accuracy"
    """Field of a result row, or of one of its groups."""
    group: str = ""
    """Questions that count, a name in `groups` of the rows; empty: all questions."""
    sampled: bool = False
    """Read the rows with the highest temperature of the evaluation instead of greedy ones."""
    dispatch: str = "parallel"
    """How calls were carried out."""
    k: Literal["all", "smallest", "largest"] = "all"
    """The overview budgets that count."""

    def value(self, result: Row) -> float | None:
        """Return the figure of a run; None if its evaluation lacks what the figure needs.

        Args:
            result: Contents of the run's `result.json`.
        """
        rows = [row for row in result.get(self.phase, []) if row["dispatch"] == self.dispatch]
        highest = max((row["temperature"] for row in rows), default=0.0)
        if self.sampled and not highest:
            return None
        rows = [row for row in rows if row["temperature"] == (highest if self.sampled else 0)]
        if self.k != "all" and rows:
            choose = min if self.k == "smallest" else max
            chosen = choose(row["k"] for row in rows)
            rows = [row for row in rows if row["k"] == chosen]
        if not self.group:
            return statistics.mean(row[self.field] for row in rows) if rows else None
        groups = [row.get("groups", {}).get(self.group) for row in rows]
        known = [group for group in groups if group and group[self.field] is not None]
        if not known:
            return None
        # Weighted by n: at some K, few questions belong to a group.
        total = sum(group["n"] for group in known)
        return sum(group["n"] * group[self.field] for group in known) / total


LINES = (
    Line("accuracy before", "before"),
    Line("accuracy after", "after"),
    Line("accuracy before, sampled", "before", sampled=True),
    Line("accuracy after, sampled", "after", sampled=True),
    Line("calls before", "before", "calls"),
    Line("calls after", "after", "calls"),
    Line("calls after, answer not shown", "after", "calls", "hidden"),
    Line("share of those turns with several calls", "after", "parallel", "hidden"),
    Line("calls after, choice, answer shown", "after", "calls", "mcq shown"),
    Line("accuracy without tools before, largest K", "before", dispatch="none", k="largest"),
    Line("accuracy without tools after, largest K", "after", dispatch="none", k="largest"),
    Line("accuracy without tools after, smallest K", "after", dispatch="none", k="smallest"),
    Line("compliance before, sampled", "before", "compliance", sampled=True),
    Line("compliance after, sampled", "after", "compliance", sampled=True),
    Line("compliance after", "after", "compliance"),
    Line("accuracy after, one call per turn", "after", dispatch="sequential"),
)


def figures(result: Row) -> dict[str, float | None]:
    """Return the figures of a run, by the name of their line.

    Args:
        result: Contents of the run's `result.json`.
    """
    found = {line.name: line.value(result) for line in LINES}
    found |= {"minutes": result["seconds"] / 60, "goodput": result.get("goodput")}
    checks = ("token_mismatches", "logprob_gap", "recompilations_after_warmup")
    return found | {name.replace("_", " "): result[name] for name in checks}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m paravt_extras.summary", description=__doc__)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="folders of finished runs")
    parser.add_argument(
        "--table-2",
        action="store_true",
        help="show f and kappa over training beside table 2 of the paper",
    )
    parser.add_argument(
        "--evaluations",
        nargs="+",
        type=pathlib.Path,
        default=[],
        metavar="FOLDER",
        help="with --table-2: finished evaluations of the runs' weights, for the scores",
    )
    asked = parser.parse_args(argv)
    try:
        if asked.table_2:
            lines = [line for run in asked.runs for line in read_run(run, asked.evaluations)]
            print(text(lines))
        else:
            found = {run.name: [figures(_result(run))] for run in asked.runs}
            everything = [run for (run,) in found.values()]
            print(table_of_figures(found | {"mean [lowest, highest]": everything}))
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _result(run: pathlib.Path) -> Row:
    file = run / "result.json"
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist; give the folders of finished runs")
    read_config(run, "paravt_extras.summary")
    return read_result(run)


if __name__ == "__main__":
    raise SystemExit(main())
