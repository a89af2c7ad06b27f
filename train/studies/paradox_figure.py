"""The figure of `train.studies.paradox`: accuracy, f and kappa, by step and after training, with intervals over seeds.

Owns the drawing: one SVG that stands alone in a page of Markdown, so colours are attributes on white and nothing is fetched. Computes
nothing but means and ranges over seeds and a moving mean over steps, and says so in its caption. Invariant: every setting has a
colour, a dash and a mark of its own, the same in all six panels.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rollout.report.markup import Html, el, number
from train.report.chart import Scale, corners, scale, smooth, ticks

if TYPE_CHECKING:
    from train.studies.paradox import Result

WIDTH = 900
LEFT, RIGHT = (66, 478), (528, 884)  # the two columns, from edge to edge of their axes
TOP, PANEL, GAP = 86, 150, 22  # of the three rows
INK, QUIET, GRID, START = "#222222", "#555555", "#e4e4e4", "#8a8a8a"
BETWEEN, HALF = (
    21,
    46,
)  # of a K in the right column: from mark to mark, and half the width of the cold start's line
PARTS = 5  # of an axis
SMALL, CAPITAL = 6.8, 10.4  # width of a letter at 14 px, about: nobody can measure text here

ROWS = (
    ("accuracy", "accuracy", 1.0),
    ("format", "format f", 1.0),
    ("calls", "calls κ", None),
)  # measure, name, where its axis ends


class Style(NamedTuple):
    """How a setting looks: Okabe and Ito's colours, which colour-blind people can tell apart, and more than colour."""

    colour: str
    dash: str | None
    mark: str


STYLES = (
    Style("#0072b2", "2 3", "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z"),
    Style("#e69f00", "8 3", "M-4.5 -4.5h9v9h-9z"),
    Style("#009e73", "9 3 2 3", "M0 -6l5.5 10h-11z"),
    Style("#d55e00", None, "M0 -6.5l6.5 6.5l-6.5 6.5l-6.5 -6.5z"),
)


class Curve(NamedTuple):
    """One measure of a setting over steps."""

    steps: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def figure(results: dict[str, list[Result]], start: Result) -> str:
    """Three rows (accuracy, f, kappa) of two columns: training rollouts by step, and held-out questions by K with the cold start's.

    `results` holds a setting's runs, one a seed, all of the same steps and K. Raises ValueError for more settings than have a style.
    """
    if len(results) > len(STYLES):
        raise ValueError(
            f"results: {len(results)} settings; only {len(STYLES)} can be told apart, add to train.studies.paradox_figure.STYLES"
        )
    styles = dict(zip(results, STYLES, strict=False))
    runs = [result for column in results.values() for result in column]
    last = runs[0].by_step[-1]["step"]
    span = max(1, len(runs[0].by_step) // 12)
    x, bottom = scale(0, last, *LEFT), TOP + len(ROWS) * (PANEL + GAP) - GAP
    body = [
        _legend(styles),
        _title(LEFT, "training rollouts, by step"),
        _title(RIGHT, "held-out questions, after training"),
    ]
    for row, (measure, name, limit) in enumerate(ROWS):
        top = TOP + row * (PANEL + GAP)
        curves = {setting: _curve(column, measure, span) for setting, column in results.items()}
        held_out = [at[measure] for result in (*runs, start) for at in result.after.values()]
        axis = ticks(
            0.0,
            limit or max(*held_out, *(value for curve in curves.values() for value in curve.high)),
            PARTS,
        )
        y = scale(axis[0], axis[-1], top + PANEL, top)
        middle = top + PANEL / 2
        body.append(
            _text(name, 18, middle, size=14, colour=INK, transform=f"rotate(-90 18 {middle})")
        )
        body += [_axes(column, axis, y) for column in (LEFT, RIGHT)]
        body += _by_step(curves, x, y, styles)
        body += _by_k(results, start, measure, name, y, styles)
    body += [
        _text(number(step), x(step), bottom + 18)
        for step in ticks(0, last, PARTS)
        if step <= last and step == round(step)
    ]
    body += [_text(f"K = {k}", place, bottom + 18) for k, place in _places(start).items()]
    caption = _caption(max(len(column) for column in results.values()), 2 * span + 1)
    body += [_text(line, LEFT[0], bottom + 46 + 18 * i, "start") for i, line in enumerate(caption)]
    return _page(body, height=bottom + 46 + 18 * len(caption))


def _page(body: list[Html], height: int) -> Html:
    title = el("title", "Accuracy, format and calls of each setting, by step and after training")
    white = el("rect", width=WIDTH, height=height, fill="#ffffff")
    look = {
        "viewBox": f"0 0 {WIDTH} {height}",
        "width": WIDTH,
        "height": height,
        "font_family": "Helvetica, Arial, sans-serif",
    }
    return el("svg", title, white, body, xmlns="http://www.w3.org/2000/svg", role="img", **look)


def _caption(seeds: int, window: int) -> list[str]:
    left = f"moving mean over {window} steps"
    if seeds > 1:
        left = f"mean over {seeds} seeds of a {left}, shaded from lowest to highest"
        right = f"mark, mean over {seeds} seeds; whisker, lowest to highest"
    else:
        left, right = f"one seed, {left}", "one seed"
    return [
        f"Left: {left}.",
        f"Right: {right}; grey, the cold start that all settings share.",
        "f: share of rollouts that keep the format. κ: calls carried out per rollout.",
        "K: frames of the overview; on the left, those that each setting trains with.",
    ]


def _by_step(curves: dict[str, Curve], x: Scale, y: Scale, styles: dict[str, Style]) -> list[Html]:
    """All bands, then all lines: no line may lie under another setting's band."""
    bands = [
        _band(curve, x, y, styles[name].colour)
        for name, curve in curves.items()
        if curve.low != curve.high
    ]
    return bands + [_line(name, curve, x, y, styles[name]) for name, curve in curves.items()]


def _by_k(
    results: dict[str, list[Result]],
    start: Result,
    measure: str,
    title: str,
    y: Scale,
    styles: dict[str, Style],
) -> list[Html]:
    """For each K the cold start's line, and over it a mark a setting, side by side."""
    parts = []
    for k, middle in _places(start).items():
        parts.append(
            _cold_start(f"cold start, K = {k}: {title}", start.after[k][measure], middle, y)
        )
        for i, (name, column) in enumerate(results.items()):
            place = middle + (i - (len(results) - 1) / 2) * BETWEEN
            parts.append(
                _mark(
                    f"{name}, K = {k}: {title}",
                    [result.after[k][measure] for result in column],
                    place,
                    y,
                    styles[name],
                )
            )
    return parts


def _places(start: Result) -> dict[int, float]:
    """The middle of each K in the right column."""
    share = (RIGHT[1] - RIGHT[0]) / len(start.after)
    return {k: RIGHT[0] + share * (i + 0.5) for i, k in enumerate(sorted(start.after))}


def _curve(column: Sequence[Result], measure: str, span: int) -> Curve:
    """Mean and range over seeds of each seed's moving mean."""
    seeds = [
        smooth([(line["step"], line[measure]) for line in result.by_step], span)
        for result in column
    ]
    at = [[value for _, value in points] for points in zip(*seeds, strict=True)]
    return Curve(
        [step for step, _ in seeds[0]],
        [statistics.mean(v) for v in at],
        [min(v) for v in at],
        [max(v) for v in at],
    )


def _legend(styles: dict[str, Style]) -> Html:
    """Line, mark and name of every setting, and the cold start's line, in the middle above all."""
    names = [*styles, "cold start"]
    symbol, gap = 42, 22
    widths = [
        symbol + sum(CAPITAL if letter.isupper() else SMALL for letter in name) for name in names
    ]
    left = (WIDTH - sum(widths) - gap * (len(names) - 1)) / 2
    parts = []
    for name, width in zip(names, widths, strict=True):
        colour, dash, mark = styles.get(name, Style(START, None, ""))
        parts.append(_stroke(left, left + symbol - 8, 30.0, 30.0, colour, 2.5, dash))
        if mark:
            parts.append(_shape(mark, left + symbol / 2 - 4, 30, colour))
        parts.append(_text(name, left + symbol, 35, "start", 14, INK))
        left += width + gap
    return el("g", parts)


def _title(column: tuple[int, int], text: str) -> Html:
    return _text(text, sum(column) / 2, TOP - 14, size=14, colour=INK, font_weight="bold")


def _axes(column: tuple[int, int], axis: list[float], y: Scale) -> Html:
    parts = [_stroke(*column, y(value), y(value), GRID, 1) for value in axis[1:]]
    parts += [_text(number(value), column[0] - 7, y(value) + 4, "end") for value in axis]
    parts.append(_stroke(*column, y(axis[0]), y(axis[0]), QUIET, 1))
    parts.append(_stroke(column[0], column[0], y(axis[0]), y(axis[-1]), QUIET, 1))
    return el("g", parts)


def _band(curve: Curve, x: Scale, y: Scale, colour: str) -> Html:
    there = [(x(step), y(value)) for step, value in zip(curve.steps, curve.high, strict=True)]
    back = [(x(step), y(value)) for step, value in zip(curve.steps, curve.low, strict=True)]
    return el("polygon", points=corners(there + back[::-1]), fill=colour, fill_opacity=0.15)


def _line(name: str, curve: Curve, x: Scale, y: Scale, style: Style) -> Html:
    points = corners(
        [(x(step), y(value)) for step, value in zip(curve.steps, curve.mean, strict=True)]
    )
    look = {
        "fill": "none",
        "stroke": style.colour,
        "stroke_width": 2.5,
        "stroke_dasharray": style.dash,
        "stroke_linejoin": "round",
    }
    return el("polyline", el("title", name), points=points, **look)


def _cold_start(name: str, value: float, middle: float, y: Scale) -> Html:
    line = _stroke(middle - HALF, middle + HALF, y(value), y(value), START, 2.5)
    return el("g", el("title", f"{name} {number(value)}"), line)


def _mark(name: str, values: Sequence[float], x: float, y: Scale, style: Style) -> Html:
    """The mean over seeds, with a whisker from lowest to highest where there are several."""
    mean, low, high = statistics.mean(values), min(values), max(values)
    shape, title = _shape(style.mark, x, y(mean), style.colour), f"{name} {number(mean)}"
    if len(values) == 1:
        return el("g", el("title", title), shape)
    whisker = [_stroke(x, x, y(low), y(high), style.colour, 2)]
    whisker += [_stroke(x - 4, x + 4, y(end), y(end), style.colour, 2) for end in (low, high)]
    return el("g", el("title", f"{title} [{number(low)}, {number(high)}]"), whisker, shape)


def _shape(mark: str, x: float, y: float, colour: str) -> Html:
    return el(
        "path", d=mark, transform=f"translate({x:.1f} {y:.1f})", fill=colour, stroke="#ffffff"
    )


def _stroke(
    x1: float, x2: float, y1: float, y2: float, colour: str, width: float, dash: str | None = None
) -> Html:
    return el(
        "line", x1=x1, x2=x2, y1=y1, y2=y2, stroke=colour, stroke_width=width, stroke_dasharray=dash
    )


def _text(
    text: str,
    x: float,
    y: float,
    anchor: str = "middle",
    size: int = 13,
    colour: str = QUIET,
    **more: str,
) -> Html:
    return el("text", text, x=x, y=y, text_anchor=anchor, font_size=size, fill=colour, **more)
