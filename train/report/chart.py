"""The values of a run's charts: a line over steps, and seconds by phase as stacked bars.

`chart.html.jinja` draws them as inline SVG with classes of report.css, so that a chart follows the
page's light or dark theme. A missing value leaves a gap: it is never drawn as 0 or bridged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from rollout.report.templates import number

LEFT, RIGHT, TOP, BOTTOM = 40, 312, 8, 130  # the edges of the axes, in a drawing of 320 by 150
POINTS = 300  # more than that is not to be seen at this width
BARS = 60

Point = tuple[float, float | None]
Scale = Callable[[float], float]


@dataclasses.dataclass
class Chart:
    """What the template draws."""

    left, right, top, bottom = LEFT, RIGHT, TOP, BOTTOM
    grid: list[tuple[float, float]]
    """Height and value of each line of the grid."""
    steps: list[tuple[float, str, str]]
    """Place, anchor and text of the labels below."""
    column: float
    """Width of the columns below."""
    hovers: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    """Left edge of each column, and its values in words."""
    curves: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Class and corners of each polyline."""
    dots: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """Values that have no neighbour to be joined to."""
    bars: list[tuple[float, float, float, int]] = dataclasses.field(default_factory=list)
    """Left edge, top, height and layer."""
    legend: list[str] = dataclasses.field(default_factory=list)
    """Names of the layers."""


def line_chart(
    points: Sequence[Point], low: float | None = None, high: float | None = None
) -> Chart:
    """A curve over steps: raw values faint, their moving average strong.

    `low` and `high` widen the axis, which always holds the data.
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
        elif span == 1:  # too few to be smoothed
            chart.curves.append(("smooth", _corners(run, x, y)))
        else:
            chart.curves.append(("raw", _corners(run, x, y)))
            chart.curves.append(("smooth", _corners(smooth(run, span), x, y)))
    for i, (step, value) in enumerate(columns):
        chart.hovers.append((LEFT + i * chart.column, f"step {step:.0f}: {number(value)}"))
    return chart


def stacked_chart(
    steps: Sequence[float], series: Sequence[tuple[str, Sequence[float | None]]]
) -> Chart:
    """Bars over steps, one layer per series, the first at the bottom; None counts for nothing."""
    names = [name for name, _ in series]
    layers = [_thin(list(zip(steps, values, strict=True)), BARS) for _, values in series]
    columns = list(zip(*layers, strict=True))
    highest = max(sum(value or 0.0 for _, value in column) for column in columns)
    chart, _, y = _axes(layers[0], columns, ticks(0.0, highest))
    chart.legend = names
    for i, column in enumerate(columns):
        left, height = LEFT + i * chart.column, 0.0
        for layer, (_, value) in enumerate(column):
            if value:
                top = y(height + value)
                chart.bars.append((left, top, y(height) - top, layer))
                height += value
        figures = [f"{name} {number(v)}" for name, (_, v) in zip(names, column, strict=True)]
        chart.hovers.append((left, f"step {column[0][0]:.0f}: {', '.join(figures)}"))
    return chart


def _axes(
    points: Sequence[Point], columns: Sequence[object], axis: list[float]
) -> tuple[Chart, Scale, Scale]:
    """A chart with nothing but axes, and where a step and a value lie."""
    first, last = points[0][0], points[-1][0]
    x, y = _scale(first, last, LEFT, RIGHT), _scale(axis[0], axis[-1], BOTTOM, TOP)
    middle = (LEFT + RIGHT) / 2
    if first == last:
        steps = [(middle, "middle", f"step {first:.0f}")]
    else:
        left, right = (LEFT, "start", f"{first:.0f}"), (RIGHT, "end", f"{last:.0f}")
        steps = [left, (middle, "middle", "step"), right]
    grid = [(y(value), value) for value in axis]
    return Chart(grid, steps, (RIGHT - LEFT) / len(columns)), x, y


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    """Lays [low, high] over [start, end]; a range that is one value lies in the middle."""
    return lambda value: (
        start + (end - start) * ((value - low) / (high - low) if high > low else 0.5)
    )


def _corners(run: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    """What SVG calls `points`."""
    return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in run)


def ticks(low: float, high: float, parts: int = 3) -> list[float]:
    """Round values that enclose [low, high] and cut it into about `parts`, at most one more.

    The axis starts at 0 where the data come near it.
    """
    if 0 <= low < 0.4 * high:
        low = 0.0
    if high <= low:
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low) / 2, low + abs(low) / 2)
    rough = (high - low) / parts
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [i * step for i in range(first, last + 1)]


def _thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points, each the mean of its share of neighbours, at the share's last step.

    The ends keep their steps: the axis is labelled with them.
    """
    if len(points) <= limit:
        return list(points)
    edges = [round(i * len(points) / limit) for i in range(limit + 1)]
    thin = []
    for a, b in zip(edges, edges[1:], strict=False):
        known = [value for _, value in points[a:b] if value is not None]
        thin.append((points[b - 1][0], sum(known) / len(known) if known else None))
    return [(points[0][0], thin[0][1]), *thin[1:]]


def _runs(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """The points between gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((step, value))
    return [run for run in runs if run]


def smooth(run: Sequence[tuple[float, float]], span: int) -> list[tuple[float, float]]:
    """The mean over `span` points to each side, or as many as there are."""
    out = []
    for i, (step, _) in enumerate(run):
        window = [value for _, value in run[max(0, i - span) : i + span + 1]]
        out.append((step, sum(window) / len(window)))
    return out
