"""A run's charts as inline SVG: lines over steps.

Matplotlib draws them. Their colours are variables of report.css, so a chart follows the light or
dark theme of the page. A missing value leaves a gap in the line.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import NamedTuple

import markupsafe
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rollout.report.templates import number

# Points (1/72 inch), which are the units of the drawing.
WIDTH = 320
HEIGHT = 150
# A line has at most this many points: about one per pixel.
POINTS = 300
# Matplotlib knows no variables of CSS. It draws with the colours #000000, #000001, ... instead.
COLOURS = ("accent", "line", "quiet", "s0", "s1", "s2", "s3", "s4", "s5")

Point = tuple[float, float | None]


class Chart(NamedTuple):
    """A drawing, and the names of its curves, if there are several."""

    svg: markupsafe.Markup
    legend: Sequence[str] = ()


def line_chart(
    points: Sequence[Point], low: float | None = None, high: float | None = None
) -> Chart:
    """Return a curve over steps: raw values faint, their moving average strong.

    Args:
        points: (step, value); None leaves a gap. At least one value is not None.
        low: value that the y-axis must include.
        high: value that the y-axis must include.
    """
    steps, values = _thin(points)
    bounds = [bound for bound in (low, high) if bound is not None]
    axes = _axes(steps, np.append(values, bounds))
    span = len(values) // 12
    if span > 1:
        axes.plot(steps, values, color=_colour("accent"), linewidth=1, alpha=0.45)
    _line(axes, steps, moving_mean(values, span), "accent")
    return Chart(_svg(axes))


def lines_chart(
    series: Sequence[tuple[str, Sequence[Point]]],
    low: float,
    high: float,
) -> Chart:
    """Return several curves over steps, each in a colour of its own.

    Args:
        series: (name, points) of each curve.
        low: value that the y-axis must include.
        high: value that the y-axis must include.
    """
    lines = [_thin(points) for _, points in series]
    everything = np.concatenate(lines, axis=1)
    axes = _axes(everything[0], np.append(everything[1], (low, high)))
    for n, (steps, values) in enumerate(lines):
        _line(axes, steps, values, f"s{n % 6}")
    return Chart(_svg(axes), [name for name, _ in series])


def moving_mean(values: np.ndarray, span: int) -> np.ndarray:
    """Return the means of known values over `span` to each side, fewer at the ends; NaN stays."""
    known = np.isfinite(values)
    window = np.ones(2 * span + 1)
    sums = np.convolve(np.where(known, values, 0.0), window, "same")
    counts = np.convolve(known, window, "same")
    return np.where(known, sums / np.maximum(counts, 1), np.nan)


def _thin(points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and the values, NaN for None: neighbours are merged into at most `POINTS`
    means. The first and the last step stay."""
    steps, values = np.array(points, float).T
    if len(steps) <= POINTS:
        return steps, values
    groups = [group[np.isfinite(group)] for group in np.array_split(values, POINTS)]
    means = [group.mean() if group.size else np.nan for group in groups]
    return np.linspace(steps[0], steps[-1], POINTS), np.array(means)


def _axes(steps: np.ndarray, values: np.ndarray) -> Axes:
    """Return an empty chart whose axes include the steps and the values.

    The y-axis starts at 0 if the values come near it.
    """
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), facecolor="none")
    axes = figure.add_axes((0.125, 0.135, 0.85, 0.81))
    low, high = np.nanmin(values), np.nanmax(values)
    if 0 <= low < 0.4 * high:
        low = 0.0
    if low == high:
        # A constant needs an axis around it.
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low) / 2, low + abs(low) / 2)
    ticks = MaxNLocator(3, steps=[1, 2, 2.5, 5, 10], min_n_ticks=2).tick_values(low, high)
    first, last = min(steps), max(steps)
    labels = [(0.0, "left", f"{first:.0f}"), (0.5, "center", "step"), (1.0, "right", f"{last:.0f}")]
    if first == last:
        first, last = first - 0.5, last + 0.5
        labels = [(0.5, "center", f"step {steps[0]:.0f}")]
    axes.set_xlim(first, last)
    axes.set_ylim(ticks[0], ticks[-1])
    # Plain texts and lines: matplotlib's own axes take most of the time of a page.
    axes.set_axis_off()
    style = {"color": _colour("quiet"), "fontsize": 10.5}
    for x, side, text in labels:
        axes.text(x, -0.05, text, style, ha=side, va="top", transform=axes.transAxes)
    for tick in ticks:
        axes.axhline(tick, color=_colour("line"), linewidth=1, zorder=0)
        axes.text(
            -0.02,
            tick,
            number(tick),
            style,
            ha="right",
            va="center",
            transform=axes.get_yaxis_transform(),
        )
    return axes


def _line(axes: Axes, steps: np.ndarray, values: np.ndarray, colour: str) -> None:
    """Draw a curve, and a dot for each value between two gaps."""
    axes.plot(steps, values, color=_colour(colour), linewidth=2.2)
    gaps = np.isnan(np.concatenate([[np.nan], values, [np.nan]]))
    for i in np.flatnonzero(~gaps[1:-1] & gaps[:-2] & gaps[2:]):
        dot = [steps[i]] * 2, [values[i]] * 2
        axes.plot(*dot, color=_colour(colour), linewidth=5, solid_capstyle="round")


def _colour(name: str) -> str:
    return f"#{COLOURS.index(name):06x}"


def _svg(axes: Axes) -> markupsafe.Markup:
    """Return the drawing as an element of a page, with the colours of its style sheet."""
    for artist in axes.get_children():
        artist.set_clip_on(False)
    figure, file = axes.figure, io.StringIO()
    assert isinstance(figure, Figure)
    # Text stays text.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg")
    drawing = file.getvalue()
    # Metadata and style sheets stand before the first group. Several drawings share the ids.
    drawing = drawing[drawing.index("<g id") : drawing.rindex("</svg>")]
    drawing = re.sub(r' id="\w[^"]*"', "", drawing)
    drawing = re.sub(r"#(0000\d\d)", lambda m: f"var(--{COLOURS[int(m[1], 16)]})", drawing)
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" class="chart">'
    return markupsafe.Markup(f"{head}\n{drawing}</svg>")
