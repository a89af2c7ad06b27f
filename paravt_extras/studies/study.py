"""What studies share: they carry out runs, compare their figures, and draw them.

A study is a set of ordinary run directories, so it can be interrupted and repeated: finished runs
are only read.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import RcKeyType

from configs.paravt_tiny import paravt_tiny
from paravt_extras import markdown
from paravt_jax.data.atomic import write_atomically
from paravt_jax.processes.exit_codes import USER_ERRORS, exit_code
from train.durable.allocator import reuse_freed_memory
from train.durable.interrupts import Interrupts, Stopped
from train.durable.metrics import read_metrics
from train.durable.run_directory import RunDirectory
from train.run import execute, resolved
from train.settings import EvaluationSettings, Run

Figures = dict[str, float | None]
"""Figures of a run, by the name of their line; None: not measured."""
Points = Sequence[tuple[float, float | None]]


class Style(NamedTuple):
    """The look of a line. The colours, by Okabe and Ito, suit colour-blind readers."""

    color: str
    linestyle: str
    marker: str


STYLES = (
    Style("#0072b2", ":", "o"),
    Style("#e69f00", "--", "s"),
    Style("#009e73", "-.", "^"),
    Style("#d55e00", "-", "D"),
)
_LOOK: dict[RcKeyType, Any] = {
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": "#e4e4e4",
    # Keep text as text, and ids the same in every drawing.
    "svg.fonttype": "none",
    "svg.hashsalt": "study",
}


def greedy_evaluation() -> EvaluationSettings:
    """Return the evaluation of `paravt_tiny` with greedy, parallel episodes only."""
    return dataclasses.replace(
        paravt_tiny().evaluation,
        dispatch=("parallel",),
        temperatures=(0.0,),
    )


def require_seeds(seeds: Sequence[int]) -> None:
    """Raise ValueError if these are not different seeds."""
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds: {seeds}; give different numbers of at least 0")


def carry_out(runs: Sequence[Run]) -> int:
    """Execute the runs that are not finished, in this order; return the exit code."""
    reuse_freed_memory()
    try:
        with Interrupts() as interrupts:
            for number, run in enumerate(runs, 1):
                # Open the directory of a finished run, too: it may be one with other settings.
                with RunDirectory(run.run_dir, resolved(run)):
                    finished = (pathlib.Path(run.run_dir) / "result.json").exists()
                if not finished:
                    print(
                        f"run {number} of {len(runs)}: {run.name}, seed {run.seed}", file=sys.stderr
                    )
                    execute(run, interrupts)
    except Stopped as stop:
        print(f"\n{stop}; the same command continues from there", file=sys.stderr)
        return stop.code
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


def band(axes: Axes, seeds: Sequence[Points], style: Style, label: str) -> None:
    """Draw the mean over seeds of a curve, shaded from the lowest to the highest value."""
    by_x: dict[float, list[float]] = {}
    for points in seeds:
        for x, y in points:
            if y is not None:
                by_x.setdefault(x, []).append(y)
    xs = sorted(by_x)
    means = [statistics.mean(by_x[x]) for x in xs]
    axes.plot(xs, means, **style._asdict(), markevery=max(1, len(xs) // 6), label=label)
    low = [min(by_x[x]) for x in xs]
    high = [max(by_x[x]) for x in xs]
    axes.fill_between(xs, low, high, color=style.color, alpha=0.15, linewidth=0)


def write(
    folder: pathlib.Path,
    found: Mapping[str, Sequence[Figures]],
    draw: Callable[[], Figure] | None = None,
) -> None:
    """Write results.json, table.md and, if there is a drawing, figure.svg; print the table.

    The same results give the same bytes.
    """
    content = markdown.table_of_figures(found) + "\n"
    write_atomically(folder / "results.json", json.dumps(found, indent=1) + "\n")
    write_atomically(folder / "table.md", content)
    if draw is not None:
        with matplotlib.rc_context(_LOOK):
            file = io.BytesIO()
            draw().savefig(file, format="svg", metadata={"Date": None})
        write_atomically(folder / "figure.svg", file.getvalue().decode())
    print(content)


def rl_steps(run: Run) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of a run's RL steps."""
    rows = read_metrics(pathlib.Path(run.run_dir) / "metrics.jsonl")
    return [row for row in rows if row["phase"] == "rl"]
