"""The example page runs, learns, and stays one page."""

from __future__ import annotations

import math
import pathlib

import numpy as np
import pytest

from examples import grpo_in_one_page

MOST_LINES = 200


def test_it_stays_one_page() -> None:
    lines = pathlib.Path(grpo_in_one_page.__file__).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= 100


@pytest.mark.slow
def test_accuracy_and_calls_rise(capsys) -> None:
    history = grpo_in_one_page.main()
    printed = capsys.readouterr().out
    for step, figures in enumerate(history):
        assert all(math.isfinite(value) for value in figures.values())
        assert f"step {step:2}  accuracy {figures['accuracy']:.2f}" in printed
    first, last = history[:5], history[-5:]

    def rise(name: str) -> float:
        return float(np.mean([x[name] for x in last]) - np.mean([x[name] for x in first]))

    assert rise("accuracy") >= 0.2
    assert rise("calls") >= 0.5
