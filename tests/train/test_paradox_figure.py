"""The figure of the paradox: every value at its place, every setting to be told apart, readable where it is shown."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from typing import Any, NamedTuple

import pytest

from train.studies.paradox import MEASURES, Result
from train.studies.paradox_figure import LEFT, PANEL, RIGHT, STYLES, TOP, WIDTH, figure

SETTINGS = ("GRPO", "+ exploration anchoring", "+ nFrames gating", "PARA-GRPO")
KS = (4, 16, 64)
SVG = "{http://www.w3.org/2000/svg}"


def level(value: float, steps: int = 12) -> Result:
    """A run whose every figure is `value`."""
    row = dict.fromkeys(MEASURES, value)
    return Result(
        {}, {k: dict(row) for k in KS}, [{"step": step, **row} for step in range(1, steps + 1)]
    )


def levels(*values: float) -> dict[str, list[Result]]:
    return {name: [level(value) for value in values] for name in SETTINGS}


class Text(NamedTuple):
    words: str
    x: float
    y: float
    size: float
    anchor: str
    turned: bool

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom, with letters a little wider than most fonts draw them."""
        width = 0.58 * self.size * len(self.words)
        left = self.x - {"start": 0, "middle": width / 2, "end": width}[self.anchor]
        return left, self.y - 0.75 * self.size, left + width, self.y + 0.25 * self.size


class Drawing:
    """A figure, read back."""

    def __init__(self, svg: str):
        self.svg, self.root = svg, ET.fromstring(svg)

    @property
    def texts(self) -> list[Text]:
        return [
            Text(
                e.text or "",
                float(e.attrib["x"]),
                float(e.attrib["y"]),
                float(e.attrib["font-size"]),
                e.attrib["text-anchor"],
                "transform" in e.attrib,
            )
            for e in self.root.iter(f"{SVG}text")
        ]

    def named(self, name: str) -> ET.Element:
        """The one element whose title begins with `name`."""
        [found] = [
            e for e in self.root.iter() if (e.findtext(f"{SVG}title") or "").startswith(name)
        ]
        return found

    def mark(self, name: str) -> tuple[float, float]:
        """Where the mark of a setting, a K and a measure stands."""
        [shape] = self.named(name).iter(f"{SVG}path")
        x, y = re.fullmatch(r"translate\((\S+) (\S+)\)", shape.attrib["transform"]).groups()  # pyright: ignore[reportOptionalMemberAccess]
        return float(x), float(y)

    def ends(self, name: str) -> list[float]:
        """Bottom and top of a mark's whisker; nothing where it has none."""
        heights = [
            float(line.attrib[end])
            for line in self.named(name).iter(f"{SVG}line")
            for end in ("y1", "y2")
        ]
        return [max(heights), min(heights)] if heights else []

    def lines(self, name: str) -> list[list[tuple[float, float]]]:
        """The curves of a setting: accuracy, f, kappa."""
        return [
            corners(e)
            for e in self.root.iter(f"{SVG}polyline")
            if e.findtext(f"{SVG}title") == name
        ]

    def bands(self) -> list[list[tuple[float, float]]]:
        return [corners(e) for e in self.root.iter(f"{SVG}polygon")]


def corners(element: ET.Element) -> list[tuple[float, float]]:
    pairs = (corner.split(",") for corner in element.attrib["points"].split())
    return [(float(x), float(y)) for x, y in pairs]


def height(value: float, row: int = 0, axis: float = 1.0) -> Any:
    """Where a value of a row stands whose axis goes from 0 to `axis`."""
    tops = [TOP + i * (PANEL + 22) for i in range(3)]
    return pytest.approx(tops[row] + PANEL * (1 - value / axis), abs=0.06)


def test_a_mark_stands_at_the_mean_over_seeds_and_its_whisker_from_lowest_to_highest():
    results = levels(0.5)
    results["GRPO"] = [level(0.1), level(0.2), level(0.45)]
    drawing = Drawing(figure(results, level(0.3)))
    name = "GRPO, K = 16: accuracy"
    assert drawing.mark(name)[1] == height(0.25) and drawing.ends(name) == [
        height(0.1),
        height(0.45),
    ]
    assert drawing.named(name).findtext(f"{SVG}title") == "GRPO, K = 16: accuracy 0.25 [0.1, 0.45]"
    assert drawing.mark("PARA-GRPO, K = 16: format f")[1] == height(0.5, row=1)


def test_each_measure_and_each_k_has_its_own_value():
    results = levels(0.5)
    for k, accuracy, f, kappa in ((4, 0.9, 0.1, 2.0), (16, 0.8, 0.2, 1.0), (64, 0.7, 0.3, 0.0)):
        results["PARA-GRPO"][0].after[k].update(accuracy=accuracy, format=f, calls=kappa)
    drawing = Drawing(figure(results, level(0.5)))
    for k, accuracy, f, kappa in ((4, 0.9, 0.1, 2.0), (16, 0.8, 0.2, 1.0), (64, 0.7, 0.3, 0.0)):
        places = [
            drawing.mark(f"PARA-GRPO, K = {k}: {title}")[1]
            for title in ("accuracy", "format f", "calls κ")
        ]
        assert places == [height(accuracy), height(f, row=1), height(kappa, row=2, axis=2.0)]


def test_the_axes_are_labelled_where_the_values_stand():
    drawing = Drawing(figure(levels(0.6), level(0.2)))
    labels = {
        text.words: text.y
        for text in drawing.texts
        if text.anchor == "end" and text.y < TOP + PANEL + 8
    }
    assert list(labels) == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert labels["0.6"] - 4 == pytest.approx(drawing.mark("GRPO, K = 4: accuracy")[1], abs=0.06)
    places = {text.words: text.x for text in drawing.texts if text.y > TOP + 2 * PANEL}
    assert "2.5" not in places  # a round value, and no step
    assert (places["0"], places["10"]) == (
        LEFT[0],
        pytest.approx(LEFT[0] + (LEFT[1] - LEFT[0]) * 10 / 12, abs=0.06),
    )
    for k in KS:
        marks = [drawing.mark(f"{name}, K = {k}: accuracy")[0] for name in SETTINGS]
        assert len(set(marks)) == 4 and sum(marks) / 4 == pytest.approx(
            places[f"K = {k}"], abs=0.06
        )
    assert RIGHT[0] < places["K = 4"] < places["K = 16"] < places["K = 64"] < RIGHT[1]


@pytest.mark.parametrize("where", ["by step", "after training", "cold start"])
def test_the_axis_of_kappa_ends_at_a_round_value_above_all_that_is_shown(where):
    results, start = levels(0.5), level(0.5)
    if where == "by step":
        results["GRPO"] = [Result({}, level(0.5).after, level(3.3).by_step)]
    elif where == "after training":
        results["GRPO"][0].after[4]["calls"] = 3.3
    else:
        start.after[4]["calls"] = 3.3
    drawing = Drawing(figure(results, start))
    assert drawing.mark("PARA-GRPO, K = 4: calls κ")[1] == height(0.5, row=2, axis=4.0)
    assert max(float(text.words) for text in drawing.texts if text.anchor == "end") == 4


def test_no_calls_anywhere_still_make_an_axis():
    drawing = Drawing(figure(levels(0.0), level(0.0)))
    assert drawing.mark("GRPO, K = 4: calls κ")[1] == height(0, row=2)


def test_the_cold_start_lies_under_the_marks_of_every_k():
    start = level(0.5)
    start.after[64]["accuracy"] = 0.9
    drawing = Drawing(figure(levels(0.2), start))
    for k, value in ((4, 0.5), (64, 0.9)):
        [line] = drawing.named(f"cold start, K = {k}: accuracy").iter(f"{SVG}line")
        assert float(line.attrib["y1"]) == float(line.attrib["y2"]) == height(value)
        marks = [drawing.mark(f"{name}, K = {k}: accuracy")[0] for name in SETTINGS]
        assert float(line.attrib["x1"]) < min(marks) and max(marks) < float(line.attrib["x2"])


def test_a_curve_is_the_mean_over_seeds_and_its_band_reaches_from_lowest_to_highest():
    results = levels(0.5)
    results["GRPO"] = [level(0.2), level(0.3), level(0.7)]
    drawing = Drawing(figure(results, level(0.5)))
    accuracy, f, _ = drawing.lines("GRPO")
    assert all(y == height(0.4) for _, y in accuracy) and all(y == height(0.4, row=1) for _, y in f)
    width = LEFT[1] - LEFT[0]
    assert [x for x, _ in accuracy] == [
        pytest.approx(LEFT[0] + width * step / 12, abs=0.06) for step in range(1, 13)
    ]
    band = drawing.bands()[0]
    assert all(y == height(0.7) for _, y in band[:12]) and all(
        y == height(0.2) for _, y in band[12:]
    )
    assert [x for x, _ in band] == [x for x, _ in accuracy] + [x for x, _ in accuracy[::-1]]
    assert len(drawing.bands()) == 3  # one a row: no other setting has more than one seed


def test_each_seed_is_smoothed_before_seeds_are_compared():
    """A peak of one seed at one step is spread over three, and does not stand in the band at its full height."""
    peak = level(0.0)
    peak.by_step[5]["accuracy"] = 0.9
    results = levels(0.5)
    results["GRPO"] = [peak, level(0.0)]
    drawing = Drawing(figure(results, level(0.5)))
    assert [y for _, y in drawing.lines("GRPO")[0]][3:8] == [
        height(0),
        *[height(0.15)] * 3,
        height(0),
    ]
    assert min(y for _, y in drawing.bands()[0]) == height(0.3)
    assert "moving mean over 3 steps" in drawing.svg


def test_one_seed_has_no_band_and_no_whisker():
    drawing = Drawing(figure(levels(0.5), level(0.4)))
    assert not drawing.bands() and not drawing.ends("GRPO, K = 4: accuracy")
    assert (
        drawing.named("GRPO, K = 4: accuracy").findtext(f"{SVG}title")
        == "GRPO, K = 4: accuracy 0.5"
    )
    assert "one seed" in drawing.svg and "whisker" not in drawing.svg
    assert "mean over 3 seeds" in figure(levels(0.5, 0.6, 0.7), level(0.4))


def test_a_setting_looks_the_same_everywhere_and_like_no_other():
    drawing = Drawing(figure(levels(0.4, 0.6), level(0.4)))
    for part in zip(*STYLES, strict=True):
        assert len(set(part)) == len(SETTINGS)
    for name, style in zip(SETTINGS, STYLES, strict=True):
        assert sum(text.words == name for text in drawing.texts) == 1
        curves = [
            e for e in drawing.root.iter(f"{SVG}polyline") if e.findtext(f"{SVG}title") == name
        ]
        shapes = [
            next(drawing.named(f"{name}, K = {k}: {title}").iter(f"{SVG}path"))
            for k in KS
            for title in ("accuracy", "format f", "calls κ")
        ]
        assert len(curves) == 3 and {
            (e.attrib["stroke"], e.get("stroke-dasharray")) for e in curves
        } == {style[:2]}
        assert {(e.attrib["fill"], e.attrib["d"]) for e in shapes} == {(style.colour, style.mark)}
        # nine of its panels, one of the legend
        assert sum(e.get("d") == style.mark for e in drawing.root.iter(f"{SVG}path")) == 10


@pytest.mark.parametrize("seeds", [(0.5,), (0.2, 0.5, 0.9)])
def test_text_is_large_enough_and_lies_on_nothing_else(seeds):
    drawing = Drawing(figure(levels(*seeds), level(0.4)))
    bottom = float(drawing.root.attrib["height"])
    assert all(text.size >= 11 for text in drawing.texts) and WIDTH == 900 == float(
        drawing.root.attrib["width"]
    )
    boxes = [(text.words, text.box) for text in drawing.texts if not text.turned]
    for words, (left, top, right, end) in boxes:
        assert left >= 0 and top >= 0 and right <= WIDTH and end <= bottom, words
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (
            f"{one!r} lies on {other!r}"
        )
    assert all(
        text.box[2] < LEFT[0] or RIGHT[0] - 50 < text.box[0]
        for text in drawing.texts
        if text.anchor == "end"
    )


def test_it_stands_alone():
    svg = figure(levels(0.1, 0.2), level(0.3))
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert {e.tag.removeprefix(SVG) for e in root.iter()} <= {
        "svg",
        "title",
        "rect",
        "g",
        "line",
        "path",
        "polyline",
        "polygon",
        "text",
    }
    assert not {"class", "style", "href"} & {name for e in root.iter() for name in e.attrib}
    assert svg.count("://") == 1 and "nan" not in svg.lower() and "inf" not in svg.lower()
    white = root.find(f"{SVG}rect")
    assert white is not None and (
        white.attrib["fill"],
        white.attrib["width"],
        white.attrib["height"],
    ) == (
        "#ffffff",
        "900",
        root.attrib["height"],
    )


def test_names_are_text_whatever_they_hold():
    hostile = "</title><script>'\"&"
    results = {hostile: [level(0.5)], "b": [level(0.5)]}
    drawing = Drawing(figure(results, level(0.4)))
    assert hostile in [text.words for text in drawing.texts] and drawing.lines(hostile)
    assert not list(drawing.root.iter(f"{SVG}script"))


def test_more_settings_than_styles_are_refused():
    with pytest.raises(ValueError, match="5 settings; only 4 can be told apart"):
        figure({str(i): [level(0.5)] for i in range(5)}, level(0.5))
