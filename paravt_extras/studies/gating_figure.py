"""The figure of `gating`: greedy accuracy and crops by K over the steps of RL.

It has a column for each arm. Lines are means over seeds, shaded from the lowest to the highest.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from paravt_extras.report.discovery import of_group
from paravt_extras.studies.paradox_figure import LOOK, QUIET, STYLES, Style

Row = dict[str, Any]
PANELS: dict[str, tuple[Callable[[Row], float | None], float]] = {
    "choice: accuracy": (of_group("mcq", "score"), 1.0),
    "choice: crops": (of_group("mcq", "calls"), 2.0),
    "grounding: IoU": (of_group("tvg", "score"), 1.0),
    "grounding: crops": (of_group("tvg", "calls"), 2.0),
}
"""By name of the panel: its value, and the top of its axis."""


def figure(results: dict[str, list[list[Row]]]) -> str:
    """The figure as SVG. The same results give the same bytes.

    Args:
        results: The greedy rows of each arm's runs, one run per seed.
    """
    with matplotlib.rc_context(LOOK):
        file = io.BytesIO()
        title = "Greedy accuracy and crops by K over the steps of RL, with and without gating"
        draw(results).savefig(file, format="svg", metadata={"Date": None, "Title": title})
    return file.getvalue().decode()


def draw(results: dict[str, list[list[Row]]]) -> Figure:
    """Draw a row of panels per measure, and a column per arm. Argument as for `figure`."""
    drawing = Figure(figsize=(8.4, 8.6), layout="constrained")
    panels = drawing.subplots(len(PANELS), len(results), sharex=True, sharey="row", squeeze=False)
    budgets = sorted({row["k"] for runs in results.values() for run in runs for row in run})
    for column, (arm, runs) in enumerate(results.items()):
        panels[0, column].set_title(f"trained with {arm}")
        for axes, (name, (value, top)) in zip(panels[:, column], PANELS.items(), strict=True):
            for k, style in zip(budgets, STYLES, strict=False):
                _line(axes, runs, k, value, style)
            # Crops per question can exceed 2.
            axes.set_ylim(0, max(top, axes.get_ylim()[1]))
            if column == 0:
                axes.set_ylabel(name)
        panels[-1, column].xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[-1, column].set_xlabel("step of RL")
    keys = [Line2D([], [], **style._asdict()) for style in STYLES[: len(budgets)]]
    labels = [f"asked with K = {k}" for k in budgets]
    drawing.legend(keys, labels, loc="outside upper center", ncols=len(keys), frameon=False)
    seeds = max(len(runs) for runs in results.values())
    caption = f"Held-out questions, greedy; mean over {seeds} seeds, shaded from lowest to highest."
    drawing.supxlabel(caption, x=0.02, ha="left", color=QUIET, fontsize="medium")
    return drawing


def _line(
    axes: Axes,
    runs: Sequence[list[Row]],
    k: int,
    value: Callable[[Row], float | None],
    style: Style,
) -> None:
    """Draw the mean and the range over runs of a value at K."""
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for row in run:
            found = value(row)
            if row["k"] == k and found is not None:
                by_step.setdefault(row["step"], []).append(found)
    steps = sorted(by_step)
    means = [statistics.mean(by_step[step]) for step in steps]
    axes.plot(steps, means, **style._asdict(), markersize=4)
    low = [min(by_step[step]) for step in steps]
    high = [max(by_step[step]) for step in steps]
    axes.fill_between(steps, low, high, color=style.color, alpha=0.15, linewidth=0)
