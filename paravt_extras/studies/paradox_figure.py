"""The figure of `paravt_extras.studies.paradox`: accuracy, compliance and kappa by step and after.

It shows means and ranges over seeds, and a moving mean over steps. A setting has the same colour,
dash and marker in all six panels.
"""

from __future__ import annotations

import dataclasses
import io
import statistics
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import RcKeyType

from paravt_extras.report.chart import smooth

ROWS = {"accuracy": "accuracy", "compliance": "compliance", "calls": "calls κ"}
INK, QUIET, GRID, START = "#222222", "#555555", "#e4e4e4", "#8a8a8a"
# Distance between markers, and half the width of the cold start's line. The unit is the distance
# between two K on the x-axis.
MARKER_DISTANCE = 0.18
HALF_WIDTH = 0.4
LOOK: dict[RcKeyType, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": QUIET,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": "medium",
    "axes.titleweight": "bold",
    # The first font comes with matplotlib, so it is always found.
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "grid.color": GRID,
    "lines.linewidth": 2,
    # Keep text as text, and ids the same in every drawing.
    "svg.fonttype": "none",
    "svg.hashsalt": "paradox",
    "text.color": INK,
    "xtick.color": QUIET,
    # Leave room for markers at 0.
    "xtick.major.pad": 8,
    "xtick.major.size": 0,
    "ytick.color": QUIET,
    "ytick.major.size": 0,
}


@dataclasses.dataclass(frozen=True)
class Result:
    """The measures of one run."""

    before: dict[int, dict[str, Any]]
    """On held-out questions before RL, by K."""
    after: dict[int, dict[str, Any]]
    """The same after RL."""
    by_step: list[dict[str, float]]
    """Of training rollouts; [] for the cold start."""
    by_temperature: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Format of held-out rollouts, a row per phase, temperature and K."""


class Style(NamedTuple):
    """The look of a setting. The colours, by Okabe and Ito, suit colour-blind readers."""

    color: str
    linestyle: str
    marker: str


STYLES = (
    Style("#0072b2", ":", "o"),
    Style("#e69f00", "--", "s"),
    Style("#009e73", "-.", "^"),
    Style("#d55e00", "-", "D"),
)


def figure(results: dict[str, list[Result]], start: Result) -> str:
    """The figure as SVG. The same results give the same bytes. Arguments as for `draw`."""
    with matplotlib.rc_context(LOOK):
        file = io.BytesIO()
        title = "Accuracy, format and calls of each setting, by step and after training"
        draw(results, start).savefig(file, format="svg", metadata={"Date": None, "Title": title})
    return file.getvalue().decode()


def draw(results: dict[str, list[Result]], start: Result) -> Figure:
    """Draw three rows of two panels: training rollouts by step, and held-out questions by K.

    Args:
        results: The runs of each setting, one per seed, all with the same steps and K.
        start: The cold start.

    Raises:
        ValueError: There are more settings than styles.
    """
    if len(results) > len(STYLES):
        raise ValueError(
            f"results: {len(results)} settings for {len(STYLES)} styles; "
            "add to paravt_extras.studies.paradox_figure.STYLES"
        )
    runs = [result for column in results.values() for result in column]
    # The moving mean runs over `span` steps before and after each.
    span = max(1, len(runs[0].by_step) // 12)
    drawing = Figure(figsize=(9.4, 7.4), layout="constrained")
    panels = drawing.subplots(len(ROWS), 2, sharex="col", sharey="row")
    for (measure, name), (by_step, by_k) in zip(ROWS.items(), panels, strict=True):
        _by_step(by_step, results, measure, span)
        _by_k(by_k, results, start, measure)
        by_step.set_ylabel(name)
        by_step.set_ylim(0, None if measure == "calls" else 1)
        by_k.tick_params(labelleft=True)
    left, right = panels[0]
    left.set_title("training rollouts, by step")
    right.set_title("held-out questions, after training")
    keys = [Line2D([], [], **style._asdict()) for style in STYLES[: len(results)]]
    keys.append(Line2D([], [], color=START))
    drawing.legend(
        keys, [*results, "cold start"], loc="outside upper center", ncols=5, frameon=False
    )
    caption = _caption(max(len(column) for column in results.values()), 2 * span + 1)
    drawing.supxlabel(caption, x=0.02, ha="left", color=QUIET, fontsize="medium")
    return drawing


def _by_step(axes: Axes, results: dict[str, list[Result]], measure: str, span: int) -> None:
    """Draw the mean and the range over seeds of each seed's moving mean."""
    steps = [line["step"] for line in next(iter(results.values()))[0].by_step]
    for (name, column), style in zip(results.items(), STYLES, strict=False):
        seeds = [
            smooth([(line["step"], line[measure]) for line in result.by_step], span)
            for result in column
        ]
        values = [[value for _, value in points] for points in zip(*seeds, strict=True)]
        axes.plot(
            steps,
            [statistics.mean(over_seeds) for over_seeds in values],
            color=style.color,
            linestyle=style.linestyle,
            label=name,
            clip_on=False,
            zorder=3,
        )
        if len(column) > 1:
            low = [min(over_seeds) for over_seeds in values]
            high = [max(over_seeds) for over_seeds in values]
            axes.fill_between(steps, low, high, color=style.color, alpha=0.15, linewidth=0)
    axes.set_xlim(0, steps[-1])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 5, 10]))


def _by_k(axes: Axes, results: dict[str, list[Result]], start: Result, measure: str) -> None:
    """Draw for each K the cold start's line, and over it a marker per setting, side by side."""
    ks = sorted(start.after)
    for place, k in enumerate(ks):
        value = start.after[k][measure]
        axes.plot([place - HALF_WIDTH, place + HALF_WIDTH], [value] * 2, color=START, clip_on=False)
    for i, ((name, column), style) in enumerate(zip(results.items(), STYLES, strict=False)):
        values = [[result.after[k][measure] for result in column] for k in ks]
        means = [statistics.mean(over_seeds) for over_seeds in values]
        below = [mean - min(over_seeds) for mean, over_seeds in zip(means, values, strict=True)]
        above = [max(over_seeds) - mean for mean, over_seeds in zip(means, values, strict=True)]
        # The markers of a K are centred on it.
        offset = (i - (len(results) - 1) / 2) * MARKER_DISTANCE
        axes.errorbar(
            [place + offset for place in range(len(ks))],
            means,
            yerr=(below, above) if len(column) > 1 else None,
            fmt=style.marker,
            color=style.color,
            markeredgecolor="white",
            markersize=9,
            capsize=4,
            label=name,
            clip_on=False,
            zorder=3,
        )
    axes.set_xticks(range(len(ks)), [f"K = {k}" for k in ks])


def _caption(seeds: int, window: int) -> str:
    left = f"moving mean over {window} steps"
    if seeds > 1:
        left = f"mean over {seeds} seeds of a {left}, shaded from lowest to highest"
        right = f"mark, mean over {seeds} seeds; whisker, lowest to highest"
    else:
        left, right = f"one seed, {left}", "one seed"
    return (
        f"Left: {left}.\n"
        f"Right: {right}; grey, the cold start that all settings share.\n"
        "Compliance: share of rollouts that keep the format. κ: calls carried out per rollout.\n"
        "K: frames of the overview; on the left, those that each setting trains with."
    )
