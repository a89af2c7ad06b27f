"""The figure of the paradox: each value at its place, each setting told apart, readable alone."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from paravt_extras.studies.paradox import MEASURES
from paravt_extras.studies.paradox_figure import START, STYLES, Result, draw, figure

SETTINGS = ("GRPO", "+ exploration anchoring", "+ nFrames gating", "PARA-GRPO")
KS = (4, 16, 64)


def level(value: float, steps: int = 12) -> Result:
    """A run whose every figure is `value`."""
    row = dict.fromkeys(MEASURES, value)
    return Result(
        {}, {k: dict(row) for k in KS}, [{"step": step, **row} for step in range(1, steps + 1)]
    )


def levels(*values: float) -> dict[str, list[Result]]:
    return {name: [level(value) for value in values] for name in SETTINGS}


# matplotlib's types say less than these tests ask, hence Any.


def panels(drawing: Any, column: int) -> dict[str, Any]:
    return dict(zip(MEASURES, drawing.axes[column::2], strict=True))


def curve(axes: Any, name: str) -> Any:
    [line] = [line for line in axes.lines if line.get_label() == name]
    return line


def marks(axes: Any, name: str) -> Any:
    """The marks of a setting, its caps and its whiskers."""
    [found] = [each for each in axes.containers if each.get_label() == name]
    return found.lines


def whiskers(axes: Any, name: str) -> list[list[float]]:
    """Bottom and top of each."""
    return [[y for _, y in ends] for bars in marks(axes, name)[2] for ends in bars.get_segments()]


def test_a_mark_stands_at_the_mean_over_seeds_and_its_whisker_from_lowest_to_highest():
    results = levels(0.5)
    results["GRPO"] = [level(0.1), level(0.2), level(0.45)]
    axes = panels(draw(results, level(0.3)), 1)["accuracy"]
    assert list(marks(axes, "GRPO")[0].get_ydata()) == pytest.approx([0.25] * 3)
    assert whiskers(axes, "GRPO") == [pytest.approx([0.1, 0.45])] * 3
    assert list(marks(axes, "PARA-GRPO")[0].get_ydata()) == [0.5] * 3


def test_each_measure_and_each_k_has_its_own_value():
    results, values = levels(0.5), {"accuracy": (0.9, 0.8, 0.7), "compliance": (0.1, 0.2, 0.3)}
    values["calls"] = (2.0, 1.0, 0.0)
    for measure, column in values.items():
        for k, value in zip(KS, column, strict=True):
            results["PARA-GRPO"][0].after[k][measure] = value
    right = panels(draw(results, level(0.5)), 1)
    shown = {m: tuple(marks(axes, "PARA-GRPO")[0].get_ydata()) for m, axes in right.items()}
    assert shown == values


def test_marks_stand_side_by_side_around_the_name_of_their_k():
    axes = panels(draw(levels(0.6), level(0.2)), 1)["calls"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["K = 4", "K = 16", "K = 64"]
    for i, middle in enumerate(axes.get_xticks()):
        places = [marks(axes, name)[0].get_xdata()[i] for name in SETTINGS]
        assert len(set(places)) == 4 and sum(places) / 4 == pytest.approx(middle)


@pytest.mark.parametrize("where", ["by step", "after training", "cold start"])
def test_the_axis_of_kappa_reaches_above_all_that_is_shown_in_both_columns(where):
    results, start = levels(0.5), level(0.5)
    if where == "by step":
        results["GRPO"] = [Result({}, level(0.5).after, level(3.3).by_step)]
    elif where == "after training":
        results["GRPO"][0].after[4]["calls"] = 3.3
    else:
        start.after[4]["calls"] = 3.3
    drawing = draw(results, start)
    assert panels(drawing, 0)["calls"].get_ylim() == panels(drawing, 1)["calls"].get_ylim()
    bottom, top = panels(drawing, 0)["calls"].get_ylim()
    assert bottom == 0 and 3.3 < top < 4
    assert panels(drawing, 1)["accuracy"].get_ylim() == (0, 1)


def test_no_calls_anywhere_still_make_an_axis():
    bottom, top = panels(draw(levels(0.0), level(0.0)), 0)["calls"].get_ylim()
    assert bottom == 0 < top


def test_the_cold_start_lies_under_the_marks_of_every_k():
    start = level(0.5)
    start.after[64]["accuracy"] = 0.9
    axes = panels(draw(levels(0.2), start), 1)["accuracy"]
    lines = [line for line in axes.lines if line.get_color() == START]
    assert [list(line.get_ydata()) for line in lines] == [[0.5] * 2, [0.5] * 2, [0.9] * 2]
    for i, line in enumerate(lines):
        places = [marks(axes, name)[0].get_xdata()[i] for name in SETTINGS]
        left, right = line.get_xdata()
        assert left < min(places) and max(places) < right
        assert line.get_zorder() < marks(axes, "GRPO")[0].get_zorder()


def test_a_curve_is_the_mean_over_seeds_and_its_band_reaches_from_lowest_to_highest():
    results = levels(0.5)
    results["GRPO"] = [level(0.2), level(0.3), level(0.7)]
    axes = panels(draw(results, level(0.5)), 0)["compliance"]
    steps = list(range(1, 13))
    assert list(curve(axes, "GRPO").get_xdata()) == steps
    assert list(curve(axes, "GRPO").get_ydata()) == pytest.approx([0.4] * 12)
    [band] = axes.collections  # no other setting has more than one seed
    corners = band.get_paths()[0].vertices
    assert (corners[:, 0].min(), corners[:, 0].max()) == (1, 12)
    assert set(corners[:, 1].round(6)) == {0.2, 0.7}
    assert band.get_zorder() < curve(axes, "PARA-GRPO").get_zorder()


def test_each_seed_is_smoothed_before_seeds_are_compared():
    """One seed's peak at one step is spread over three; the band does not reach its full height."""
    peak = level(0.0)
    peak.by_step[5]["accuracy"] = 0.9
    results = levels(0.5)
    results["GRPO"] = [peak, level(0.0)]
    drawing = draw(results, level(0.5))
    axes = panels(drawing, 0)["accuracy"]
    middle = list(curve(axes, "GRPO").get_ydata())[3:8]
    assert middle == pytest.approx([0, 0.15, 0.15, 0.15, 0])
    assert axes.collections[0].get_paths()[0].vertices[:, 1].max() == pytest.approx(0.3)
    assert "moving mean over 3 steps" in drawing.get_supxlabel()


def test_one_seed_has_no_band_and_no_whisker():
    drawing = draw(levels(0.5), level(0.4))
    assert not any(axes.collections for axes in drawing.axes)
    assert not whiskers(panels(drawing, 1)["accuracy"], "GRPO")
    assert "one seed" in drawing.get_supxlabel() and "whisker" not in drawing.get_supxlabel()
    assert "mean over 3 seeds" in draw(levels(0.5, 0.6, 0.7), level(0.4)).get_supxlabel()


def test_a_setting_looks_the_same_everywhere_and_like_no_other():
    drawing: Any = draw(levels(0.4, 0.6), level(0.4))
    assert all(len(set(part)) == len(SETTINGS) for part in zip(*STYLES, strict=True))
    [legend] = drawing.legends
    assert [text.get_text() for text in legend.get_texts()] == [*SETTINGS, "cold start"]
    for name, key, style in zip(SETTINGS, legend.get_lines(), STYLES, strict=False):
        assert (key.get_color(), key.get_linestyle(), key.get_marker()) == style
        for axes in panels(drawing, 0).values():
            line = curve(axes, name)
            assert (line.get_color(), line.get_linestyle()) == style[:2]
        for axes in panels(drawing, 1).values():
            mark, _, bars = marks(axes, name)
            assert (mark.get_color(), mark.get_marker()) == (style.color, style.marker)
            assert {to_hex(colour) for bar in bars for colour in bar.get_color()} == {style.color}


@pytest.mark.parametrize("seeds", [(0.5,), (0.2, 0.5, 0.9)])
def test_text_is_large_enough_and_no_part_lies_on_another(seeds):
    drawing: Any = draw(levels(*seeds), level(0.3))
    drawing.draw_without_rendering()
    assert all(text.get_fontsize() >= 9 for text in drawing.findobj(Text))
    parts = [axes.get_tightbbox() for axes in drawing.axes]
    parts += [drawing.legends[0].get_window_extent(), drawing._supxlabel.get_window_extent()]
    for box in parts:
        assert drawing.bbox.x0 <= box.x0 and box.x1 <= drawing.bbox.x1
        assert drawing.bbox.y0 <= box.y0 and box.y1 <= drawing.bbox.y1
    assert not any(a.overlaps(b) for a, b in itertools.combinations(parts, 2))


def test_it_stands_alone_and_is_the_same_each_time():
    svg = figure(levels(0.1, 0.2), level(0.3))
    assert svg == figure(levels(0.1, 0.2), level(0.3))
    root = ET.fromstring(svg)
    assert not {"script", "image", "a"} & {
        element.tag.rpartition("}")[2] for element in root.iter()
    }
    hrefs = [v for e in root.iter() for k, v in e.attrib.items() if k.endswith("href")]
    assert all(href.startswith("#") for href in hrefs)
    assert not re.search(r"url\((?!#)|@import|\bnan\b|\binf\b", svg)


def test_names_are_text_whatever_they_hold():
    hostile = "</title><script>'\"&"
    root = ET.fromstring(figure({hostile: [level(0.5)], "b": [level(0.5)]}, level(0.4)))
    assert hostile in [element.text for element in root.iter()]


def test_more_settings_than_styles_are_refused():
    with pytest.raises(ValueError, match="results: 5"):
        figure({str(i): [level(0.5)] for i in range(5)}, level(0.5))
