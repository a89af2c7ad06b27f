"""The example page runs, learns, and stays one page."""

from __future__ import annotations

import math
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from examples import grpo_in_one_page

MOST_LINES = 200
ROOT = pathlib.Path(__file__).parents[2]


def test_it_stays_one_page() -> None:
    lines = pathlib.Path(grpo_in_one_page.__file__).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= 100


@pytest.mark.slow
def test_a_short_run_has_finite_figures(capsys) -> None:
    history = grpo_in_one_page.main(cold_start_steps=2, steps=2)
    assert len(history) == 2
    assert all(math.isfinite(value) for figures in history for value in figures.values())
    assert "(right answer)" in capsys.readouterr().out


@pytest.mark.long
def test_accuracy_and_calls_rise() -> None:
    """As a program, without the flags of tests/conftest.py: it computes more than it compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "examples.grpo_in_one_page"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [line.split() for line in done.stdout.splitlines() if "  accuracy " in line]
    assert [int(words[1]) for words in steps] == list(range(24))
    # step N  name value  name value ...
    history = [
        {name: float(value) for name, value in zip(words[2::2], words[3::2], strict=True)}
        for words in steps
    ]
    assert all(math.isfinite(value) for figures in history for value in figures.values())
    first, last = history[:5], history[-5:]

    def rise(name: str) -> float:
        return float(np.mean([x[name] for x in last]) - np.mean([x[name] for x in first]))

    assert rise("accuracy") >= 0.2
    assert rise("calls") >= 0.5
