"""Compares finished runs in a Markdown table, read from each run's `result.json`.

python -m paravt_extras.summary runs/tiny-0 runs/tiny-1 ...     # each run's figures, and their mean
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, Literal

from paravt_extras.markdown import table_of_figures
from paravt_jax.processes.cluster import run_command
from train.durable.run_folder import read_config
from train.result import read_result

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class SummaryLine:
    """A line of the table: the mean of one figure over K."""

    name: str
    phase: Literal["before", "after"]
    field: str = "accuracy"
    """Field of a setting's figures, or of one of its groups."""
    group: str = ""
    """Questions that count, a name in `groups` of the figures; empty: all questions."""
    sampled: bool = False
    """Read the figures at the highest temperature of the evaluation instead of greedy ones."""
    dispatch: str = "parallel"
    """How calls were carried out."""
    k: Literal["all", "smallest", "largest"] = "all"
    """The overview budgets that count."""

    def value(self, result: Result) -> float | None:
        """Return the figure of a run; None if its evaluation lacks what the figure needs.

        Args:
            result: Contents of the run's `result.json`.
        """
        settings = [s for s in result.get(self.phase, []) if s["dispatch"] == self.dispatch]
        highest = max((setting["temperature"] for setting in settings), default=0.0)
        if self.sampled and not highest:
            return None
        settings = [s for s in settings if s["temperature"] == (highest if self.sampled else 0)]
        if self.k != "all":
            budgets = sorted(setting["k"] for setting in settings)
            counting = budgets[:1] if self.k == "smallest" else budgets[-1:]
            settings = [setting for setting in settings if setting["k"] in counting]
        if not self.group:
            return statistics.fmean(s[self.field] for s in settings) if settings else None
        groups = [setting.get("groups", {}).get(self.group) for setting in settings]
        known = [group for group in groups if group and group[self.field] is not None]
        if not known:
            return None
        # Weighted by n: at some K, few questions belong to a group.
        counts = [group["n"] for group in known]
        return statistics.fmean([group[self.field] for group in known], counts)


LINES = (
    SummaryLine("accuracy before", "before"),
    SummaryLine("accuracy after", "after"),
    SummaryLine("accuracy before, sampled", "before", sampled=True),
    SummaryLine("accuracy after, sampled", "after", sampled=True),
    SummaryLine("calls before", "before", "calls"),
    SummaryLine("calls after", "after", "calls"),
    SummaryLine("calls after, answer not shown", "after", "calls", "hidden"),
    SummaryLine("share of those turns with several calls", "after", "parallel", "hidden"),
    SummaryLine("calls after, choice, answer shown", "after", "calls", "mcq shown"),
    SummaryLine("accuracy without tools before, largest K", "before", dispatch="none", k="largest"),
    SummaryLine("accuracy without tools after, largest K", "after", dispatch="none", k="largest"),
    SummaryLine("accuracy without tools after, smallest K", "after", dispatch="none", k="smallest"),
    SummaryLine("compliance before, sampled", "before", "compliance", sampled=True),
    SummaryLine("compliance after, sampled", "after", "compliance", sampled=True),
    SummaryLine("compliance after", "after", "compliance"),
    SummaryLine("accuracy after, one call per turn", "after", dispatch="sequential"),
)


def figures(result: Result) -> dict[str, float | None]:
    """Return the figures of a run, by the name of their line.

    Args:
        result: Contents of the run's `result.json`.
    """
    values = {line.name: line.value(result) for line in LINES}
    values["minutes"] = result["seconds"] / 60
    checks = ("token_mismatches", "logprob_gap", "recompilations_after_warmup")
    return values | {name.replace("_", " "): result[name] for name in checks}


def read_finished(folder: pathlib.Path) -> Result:
    """Return the result of a finished run.

    Raises:
        FileNotFoundError: the run is not finished.
        RunFolderError: another version of this code made the run.
    """
    if not (folder / "result.json").exists():
        raise FileNotFoundError(
            f"{folder / 'result.json'} does not exist; give the folders of finished runs"
        )
    read_config(folder, "RUN")
    return read_result(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m paravt_extras.summary", description=__doc__)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="folders of finished runs")
    asked = parser.parse_args(argv)
    return run_command(lambda: _print_figures(asked.runs))


def _print_figures(runs: Sequence[pathlib.Path]) -> None:
    by_run = {run.name: [figures(read_finished(run))] for run in runs}
    everything = [values for (values,) in by_run.values()]
    print(table_of_figures(by_run | {"mean [lowest, highest]": everything}))


if __name__ == "__main__":
    raise SystemExit(main())
