"""The arithmetic and the table of the scaling benchmark, without its measurements."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.scaling import Row, Updates, compare, table


def updates(losses: tuple[float, ...], seconds: tuple[float, ...], *weights: float) -> Updates:
    return Updates(
        losses=losses,
        seconds=seconds,
        cpu_seconds=tuple(2 * s for s in seconds),
        sent=1.5,
        weights=tuple(np.array([w, 0.0]) for w in weights),
    )


def test_every_case_is_compared_with_one_device():
    one = updates((2.0, -4.0), (1.0, 3.0, 2.0), 1.0, -1.0)
    two = updates((2.1, -4.1), (9.0, 3.0, 2.0), 1.25, -1.5)
    first, second = compare("SFT", {(1, 1): one, (8, 2): two})
    assert first == Row("SFT", 1, 1, 0.0, 0.0, 2.0, 4.0, 1.0, 1.5)
    assert second.loss == pytest.approx(0.05)
    assert second == Row("SFT", 8, 2, second.loss, 0.5, 3.0, 6.0, 1.5, 1.5)
    head, rule, *lines = table([first, second]).splitlines()
    assert head.count("|") == rule.count("|") == lines[0].count("|") == 10
    assert lines[1] == "| SFT | 8 | 2 | 5.0e-02 | 5.0e-01 | 3.00 | 6.00 | 1.50 | 1.5 |"


def test_a_comparison_without_one_device_is_an_error():
    with pytest.raises(KeyError):
        compare("SFT", {(2, 1): updates((1.0,), (1.0,), 1.0)})
