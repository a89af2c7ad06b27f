"""Charts of a run's history as inline SVG: a line over steps, and seconds by phase as stacked bars.

Owns axes, smoothing and thinning; colours live in report.css, so that a chart follows the page's light or dark theme. What a figure
without that page needs too (`train.studies.paradox_figure`) is public.
Invariant: a missing value leaves a gap, it is never drawn as 0 or bridged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rollout.report.markup import Html, el, number

WIDTH, HEIGHT = 320, 150
LEFT, RIGHT, TOP, BOTTOM = 40, 8, 8, 20
POINTS = 300  # more than that is not to be seen at this width
BARS = 60
SERIES_COLOURS = 6  # classes s0..s5 of report.css

Point = tuple[float, float | None]
Scale = Callable[[float], float]


def line_chart(
    points: Sequence[Point], low: float | None = None, high: float | None = None
) -> Html:
    """A curve over steps: raw values faint, their moving average strong. `low` and `high` widen the axis, which always holds the data."""
    points = _thin(points, POINTS)
    known = [y for _, y in points if y is not None]
    axis = ticks(
        min(known + [low] if low is not None else known),
        max(known + [high] if high is not None else known),
    )
    x, y = _scales(points[0][0], points[-1][0], axis[0], axis[-1])
    runs = _runs(points)
    span = max(1, len(points) // 12)
    body = [_grid(axis, y), _steps(points[0][0], points[-1][0], x)]
    for run in runs:
        path = [(x(step), y(value)) for step, value in run]
        strong = [(x(step), y(value)) for step, value in smooth(run, span)]
        if len(run) == 1:
            body.append(el("circle", cx=path[0][0], cy=path[0][1], r=2.5, class_="dot"))
        elif span > 1:
            body += [_line(path, "raw"), _line(strong, "smooth")]
        else:
            body.append(_line(path, "smooth"))
    columns = _thin(points, BARS)
    width = (WIDTH - LEFT - RIGHT) / len(columns)
    for i, (step, value) in enumerate(columns):
        body.append(_hover(LEFT + i * width, width, f"step {step:.0f}: {number(value)}"))
    return _svg(body)


def stacked_chart(
    steps: Sequence[float], series: Sequence[tuple[str, Sequence[float | None]]]
) -> Html:
    """Bars over steps, one layer a series, first at the bottom, with a legend; None counts for nothing."""
    layers = [(name, _thin(list(zip(steps, values, strict=True)), BARS)) for name, values in series]
    columns = list(zip(*(points for _, points in layers), strict=True))
    totals = [sum(value or 0.0 for _, value in column) for column in columns]
    axis = ticks(0.0, max(totals))
    first, last = columns[0][0][0], columns[-1][0][0]
    x, y = _scales(first, last, axis[0], axis[-1])
    width = (WIDTH - LEFT - RIGHT) / len(columns)
    body = [_grid(axis, y), _steps(first, last, x)]
    for i, column in enumerate(columns):
        left, height = LEFT + i * width, 0.0
        for layer, (_, value) in enumerate(column):
            if value:
                top = y(height + value)
                colour = f"s{layer % SERIES_COLOURS}"
                body.append(
                    el(
                        "rect",
                        x=left,
                        y=top,
                        width=max(width - 0.6, 0.6),
                        height=y(height) - top,
                        class_=colour,
                    )
                )
                height += value
        figures = ", ".join(
            f"{name} {number(value)}" for (name, _), (_, value) in zip(layers, column, strict=True)
        )
        body.append(_hover(left, width, f"step {column[0][0]:.0f}: {figures}"))
    keys = [
        el("span", el("i", class_=f"s{i % SERIES_COLOURS}"), name)
        for i, (name, _) in enumerate(layers)
    ]
    return Html(_svg(body) + el("div", keys, class_="legend"))


def _svg(body: list[Html]) -> Html:
    return el("svg", body, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", class_="chart")


def _scales(first: float, last: float, low: float, high: float) -> tuple[Scale, Scale]:
    return scale(first, last, LEFT, WIDTH - RIGHT), scale(low, high, HEIGHT - BOTTOM, TOP)


def scale(low: float, high: float, start: float, end: float) -> Scale:
    """Lays [low, high] over [start, end] of the drawing; a range that is one value lies in the middle."""
    return lambda value: (
        start + (end - start) * ((value - low) / (high - low) if high > low else 0.5)
    )


def ticks(low: float, high: float, parts: int = 3) -> list[float]:
    """Round values that enclose [low, high] and cut it in about `parts`, at most one more; from 0 where the data come near it."""
    if 0 <= low < 0.4 * high:
        low = 0.0
    if high <= low:
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low) / 2, low + abs(low) / 2)
    rough = (high - low) / parts
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    return [
        i * step for i in range(math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6) + 1)
    ]


def _grid(axis: list[float], y: Scale) -> Html:
    parts = []
    for value in axis:
        parts.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(value), y2=y(value), class_="grid"))
        parts.append(el("text", number(value), x=LEFT - 5, y=y(value) + 3.5, text_anchor="end"))
    return el("g", parts)


def _steps(first: float, last: float, x: Scale) -> Html:
    if first == last:
        return el("text", f"step {first:.0f}", x=x(first), y=HEIGHT - 5, text_anchor="middle")
    ends = [
        ("start", first, f"{first:.0f}"),
        ("middle", (first + last) / 2, "step"),
        ("end", last, f"{last:.0f}"),
    ]
    return el(
        "g",
        [
            el("text", text, x=x(step), y=HEIGHT - 5, text_anchor=anchor)
            for anchor, step, text in ends
        ],
    )


def _line(path: list[tuple[float, float]], class_: str) -> Html:
    return el("polyline", points=corners(path), class_=class_)


def corners(path: Sequence[tuple[float, float]]) -> str:
    """What SVG calls `points`."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in path)


def _hover(left: float, width: float, text: str) -> Html:
    return el(
        "rect",
        el("title", text),
        x=left,
        y=TOP,
        width=width,
        height=HEIGHT - TOP - BOTTOM,
        class_="hover",
    )


def _thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points, each the mean of its share of neighbours, at the share's last step."""
    if len(points) <= limit:
        return list(points)
    edges = [round(i * len(points) / limit) for i in range(limit + 1)]
    thin = []
    for a, b in zip(edges, edges[1:], strict=False):
        known = [y for _, y in points[a:b] if y is not None]
        thin.append((points[b - 1][0], sum(known) / len(known) if known else None))
    # The ends keep their steps: the axis is labelled with them.
    return [(points[0][0], thin[0][1]), *thin[1:]]


def _runs(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((step, value))
    return [run for run in runs if run]


def smooth(run: list[tuple[float, float]], span: int) -> list[tuple[float, float]]:
    """The mean over `span` points to each side, or as many as there are."""
    out = []
    for i, (step, _) in enumerate(run):
        window = [value for _, value in run[max(0, i - span) : i + span + 1]]
        out.append((step, sum(window) / len(window)))
    return out
