"""What studies share: they carry out runs, compare their figures, and draw them.

A study is a set of ordinary run directories, so it can be interrupted and repeated: finished runs
are only read.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
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

from paravt_extras import markdown
from paravt_jax.data.any_path import require_local
from paravt_jax.data.stored import write_atomically
from train.durable.interrupts import Interrupts
from train.durable.metrics import read_metrics
from train.durable.run_folder import claim_folder
from train.run import command, execute, resolved
from train.settings import Run

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


def from_cold_start(start: Run) -> dict[str, Any]:
    """Return the fields of a run that begins RL with the model of a finished cold start."""
    return {"sft.steps": 0, "model.path": f"{start.run_dir}/model"}


@dataclasses.dataclass(frozen=True)
class Command:
    """What every study is asked for.

    Raises:
        ValueError: The seeds are not different numbers, or the folder is in a bucket.
    """

    run_dir: str
    seeds: tuple[int, ...]

    def __post_init__(self):
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {self.seeds}; give different numbers of at least 0")
        require_local("run_dir", self.run_dir)


def carry_out(
    runs: Sequence[Run],
    folder: pathlib.Path,
    arms: Mapping[str, Sequence[Run]],
    figures: Callable[[Run], Figures],
    draw: Callable[[Mapping[str, Sequence[Run]]], Figure],
) -> int:
    """Execute the runs that are not finished, and compare arms; return the exit code.

    Args:
        runs: All runs, in their order.
        folder: Where to write results.json, table.md and figure.svg.
        arms: The runs to compare, one per seed.
        figures: Returns the figures of a finished run.
        draw: Draws the arms.
    """

    def work(_: Run) -> int:
        with Interrupts() as interrupts:
            for number, run in enumerate(runs, 1):
                # Open the directory of a finished run, too: it may be one with other settings.
                with claim_folder(run.run_dir, resolved(run)):
                    finished = (pathlib.Path(run.run_dir) / "result.json").exists()
                if not finished:
                    print(f"run {number} of {len(runs)}: {run.run_dir}", file=sys.stderr)
                    execute(run, interrupts)
        write(folder, {arm: [*map(figures, of_arm)] for arm, of_arm in arms.items()}, draw(arms))
        return 0

    return command(runs[0], work)


def band(axes: Axes, seeds: Sequence[Points], style: Style, label: str) -> None:
    """Draw the mean over seeds of a curve, shaded from the lowest to the highest value."""
    by_x: dict[float, list[float]] = {}
    for x, y in itertools.chain(*seeds):
        if y is not None:
            by_x.setdefault(x, []).append(y)
    xs, ys = sorted(by_x), [by_x[x] for x in sorted(by_x)]
    means = [*map(statistics.mean, ys)]
    axes.plot(xs, means, **style._asdict(), markevery=max(1, len(xs) // 6), label=label)
    low, high = [*map(min, ys)], [*map(max, ys)]
    axes.fill_between(xs, low, high, color=style.color, alpha=0.15, linewidth=0)


def write(
    folder: pathlib.Path, table: Mapping[str, Sequence[Figures]], drawing: Figure | None = None
) -> None:
    """Write results.json, table.md and, if there is a drawing, figure.svg; print the table.

    The same results give the same bytes.
    """
    content = markdown.table_of_figures(table) + "\n"
    write_atomically(folder / "results.json", json.dumps(table, indent=1) + "\n")
    write_atomically(folder / "table.md", content)
    if drawing is not None:
        file = io.BytesIO()
        with matplotlib.rc_context(_LOOK):
            drawing.savefig(file, format="svg", metadata={"Date": None})
        write_atomically(folder / "figure.svg", file.getvalue().decode())
    print(content)


def rl_steps(run: Run) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of a run's RL steps."""
    lines = read_metrics(pathlib.Path(run.run_dir) / "metrics.jsonl")
    return [line for line in lines if line["phase"] == "rl"]
