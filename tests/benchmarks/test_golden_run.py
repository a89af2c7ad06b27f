"""A small run gives the figures on record (`golden_run.py`); the comparison finds differences."""

from __future__ import annotations

import math
import platform

import pytest

from benchmarks import golden_run

POSITIONS = "model.visual.pos_embed.weight"
EXPECTED = {
    "frames: checksum": 12345,
    "sft 1: tokens": 417,
    "sft 1: loss": 2.5,
    "rl 1: loss": -2.5,
    "rl 1: kl_reference": 1e-9,
    f"{POSITIONS}: norm": 4.5,
    f"{POSITIONS}: product": 0.125,
}


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() not in golden_run.PROCESSORS,
    reason="videos decode to other colours on this processor: see golden_run.PROCESSORS",
)
def test_a_run_gives_the_figures_and_weights_on_record(tmp_path):
    lines = golden_run.compare(golden_run.read_record(), golden_run.make_runs(tmp_path))
    if lines:
        message = "\n".join(["the run differs from golden_run.json:", *lines, golden_run.ADVICE])
        pytest.fail(message, pytrace=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sft 1: tokens", 417.0),
        ("sft 1: loss", 2.5 * (1 + 4e-6)),
        ("rl 1: loss", -2.5 * (1 - 5e-5)),
        ("rl 1: kl_reference", -9e-8),
        (f"{POSITIONS}: product", 0.127),  # its tolerance is a share of the norm
    ],
)
def test_a_figure_within_its_tolerance_agrees(name, value):
    assert golden_run.compare(EXPECTED, EXPECTED | {name: value}) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frames: checksum", 12346),
        ("sft 1: tokens", 416.0),
        ("sft 1: loss", 2.5 * (1 + 7e-6)),
        ("rl 1: loss", -2.5 * (1 - 7e-5)),
        ("rl 1: loss", math.nan),
        ("sft 1: tokens", math.nan),
        ("rl 1: kl_reference", -1.1e-7),
        (f"{POSITIONS}: norm", 4.503),
        (f"{POSITIONS}: product", 0.128),
    ],
)
def test_a_figure_that_differs_is_listed_with_what_was_expected(name, value):
    (line,) = golden_run.compare(EXPECTED, EXPECTED | {name: value})
    assert line.startswith(f"{name}: expected {EXPECTED[name]!r}, found {value!r}, difference ")
