"""Coordinates of a run's charts: lines over steps, and stacked bars of seconds per step.

`chart.html.jinja` draws them as inline SVG. Its colours come from classes of report.css, so a chart
follows the light or dark theme of the page. A missing value leaves a gap in the line.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from rollout.report.templates import number

# Edges of the axes, in a drawing 320 wide and 150 high. As in SVG, y grows downwards.
LEFT = 40
RIGHT = 312
TOP = 8
BOTTOM = 130
# A line has at most this many points: about one per pixel.
POINTS = 300
# At most this many bars, and columns that show their values on hover.
BARS = 60

Point = tuple[float, float | None]
Scale = Callable[[float], float]


@dataclasses.dataclass
class Chart:
    """Everything that the template draws, in its coordinates."""

    left = LEFT
    right = RIGHT
    top = TOP
    bottom = BOTTOM
    grid: list[tuple[float, float]]
    """(y, value) of each horizontal grid line."""
    steps: list[tuple[float, str, str]]
    """(x, text anchor, text) of the labels below the x-axis."""
    column: float
    """Width of a column."""
    hovers: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    """(left edge, text shown on hover) of each column."""
    curves: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """(CSS class, points) of each polyline."""
    dots: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """(x, y) of values between two gaps, which no line can show."""
    bars: list[tuple[float, float, float, int]] = dataclasses.field(default_factory=list)
    """(left edge, top, height, layer) of each bar."""
    legend: list[str] = dataclasses.field(default_factory=list)
    """Names of the layers."""


def line_chart(
    points: Sequence[Point], low: float | None = None, high: float | None = None
) -> Chart:
    """Return a curve over steps: raw values faint, their moving average strong.

    Args:
        points: (step, value); None leaves a gap. At least one value is not None.
        low: value that the y-axis must include.
        high: value that the y-axis must include.
    """
    points = _thin(points, POINTS)
    columns = _thin(points, BARS)
    values = [value for _, value in points if value is not None]
    values += [bound for bound in (low, high) if bound is not None]
    chart, x, y = _axes(points, columns, ticks(min(values), max(values)))
    span = max(1, len(points) // 12)
    for run in _runs(points):
        if len(run) == 1:
            chart.dots += [(x(step), y(value)) for step, value in run]
        elif span == 1:
            # Too few points to smooth.
            chart.curves.append(("smooth", _corners(run, x, y)))
        else:
            chart.curves.append(("raw", _corners(run, x, y)))
            chart.curves.append(("smooth", _corners(smooth(run, span), x, y)))
    for i, (step, value) in enumerate(columns):
        chart.hovers.append((LEFT + i * chart.column, f"step {step:.0f}: {number(value)}"))
    return chart


def lines_chart(
    series: Sequence[tuple[str, Sequence[Point]]],
    dashed: Sequence[Sequence[Point]],
    low: float,
    high: float,
) -> Chart:
    """Return several curves over steps, each in a colour of its own.

    Args:
        series: (name, points) of each curve. All have the same steps.
        dashed: a curve to compare with each of `series`, in the same colour; may be empty.
        low: value that the y-axis must include.
        high: value that the y-axis must include.
    """
    points = series[0][1]
    everything = [point for _, line in series for point in line]
    everything += [point for line in dashed for point in line]
    values = [value for _, value in everything if value is not None]
    chart, x, y = _axes(points, points, ticks(min([low, *values]), max([high, *values])))
    chart.legend = [name for name, _ in series]
    for style, lines in (("dashed", dashed), ("line", [line for _, line in series])):
        for i, line in enumerate(lines):
            for run in _runs(line):
                chart.curves.append((f"{style} s{i % 6}", _corners(run, x, y)))
    for i, (step, _) in enumerate(points):
        figures = [f"{name} {number(line[i][1])}" for name, line in series]
        left = LEFT + i * chart.column
        chart.hovers.append((left, f"step {step:.0f}: {', '.join(figures)}"))
    return chart


def stacked_chart(
    steps: Sequence[float], series: Sequence[tuple[str, Sequence[float | None]]]
) -> Chart:
    """Return stacked bars over steps.

    Args:
        steps: one bar per step; long histories are thinned.
        series: (name, values) of each layer, from the bottom up; None counts as 0.
    """
    names = [name for name, _ in series]
    layers = [_thin(list(zip(steps, values, strict=True)), BARS) for _, values in series]
    columns = list(zip(*layers, strict=True))
    highest = max(sum(value or 0.0 for _, value in column) for column in columns)
    chart, _, y = _axes(layers[0], columns, ticks(0.0, highest))
    chart.legend = names
    for i, column in enumerate(columns):
        left = LEFT + i * chart.column
        height = 0.0
        for layer, (_, value) in enumerate(column):
            if value:
                top = y(height + value)
                chart.bars.append((left, top, y(height) - top, layer))
                height += value
        step = column[0][0]
        figures = [f"{name} {number(v)}" for name, (_, v) in zip(names, column, strict=True)]
        chart.hovers.append((left, f"step {step:.0f}: {', '.join(figures)}"))
    return chart


def _axes(
    points: Sequence[Point], columns: Sequence[object], axis: list[float]
) -> tuple[Chart, Scale, Scale]:
    """Return a chart with axes only, and the functions from a step to x and from a value to y."""
    first = points[0][0]
    last = points[-1][0]
    x = _scale(first, last, LEFT, RIGHT)
    y = _scale(axis[0], axis[-1], BOTTOM, TOP)
    middle = (LEFT + RIGHT) / 2
    if first == last:
        steps = [(middle, "middle", f"step {first:.0f}")]
    else:
        steps = [
            (LEFT, "start", f"{first:.0f}"),
            (middle, "middle", "step"),
            (RIGHT, "end", f"{last:.0f}"),
        ]
    grid = [(y(value), value) for value in axis]
    return Chart(grid, steps, (RIGHT - LEFT) / len(columns)), x, y


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    """Map [low, high] linearly to [start, end], and an empty range to the middle."""

    def scaled(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.5
        return start + (end - start) * share

    return scaled


def _corners(run: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    """Return the `points` attribute of an SVG polyline."""
    return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in run)


def ticks(low: float, high: float, parts: int = 3) -> list[float]:
    """Round values, evenly spaced, that enclose [low, high] in about `parts` intervals.

    The axis starts at 0 if the data come near it.
    """
    if 0 <= low < 0.4 * high:
        low = 0.0
    if high <= low:
        # A constant needs an axis around it.
        margin = abs(low) / 2
        low, high = (0.0, 1.0) if low == 0 else (low - margin, low + margin)
    rough = (high - low) / parts
    power = 10.0 ** math.floor(math.log10(rough))
    # The tolerances keep rounding errors from adding an interval.
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.floor(low / step + 1e-6)
    last = math.ceil(high / step - 1e-6)
    return [i * step for i in range(first, last + 1)]


def _thin(points: Sequence[Point], limit: int) -> list[Point]:
    """Merge neighbours into at most `limit` means, each at the last step of its group."""
    if len(points) <= limit:
        return list(points)
    edges = [round(i * len(points) / limit) for i in range(limit + 1)]
    thin = []
    for start, end in itertools.pairwise(edges):
        known = [value for _, value in points[start:end] if value is not None]
        mean = sum(known) / len(known) if known else None
        thin.append((points[end - 1][0], mean))
    # The axis is labelled with the first and last step, so both have to stay.
    return [(points[0][0], thin[0][1]), *thin[1:]]


def _runs(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """Return the stretches of points between gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((step, value))
    return [run for run in runs if run]


def smooth(run: Sequence[tuple[float, float]], span: int) -> list[tuple[float, float]]:
    """Return the moving average over `span` points to each side, fewer at the ends."""
    out = []
    for i, (step, _) in enumerate(run):
        window = [value for _, value in run[max(0, i - span) : i + span + 1]]
        out.append((step, sum(window) / len(window)))
    return out
