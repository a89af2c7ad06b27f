"""Units of the plan's figures."""

from __future__ import annotations

import pytest

from paravt_extras.plan.units import counted, duration, memory, si


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (4.03e15, "4.03 PFLOP"),
        (83e9, "83.00 GFLOP"),
        (1.0, "1.00 FLOP"),
        (0.0032, "3.20 mFLOP"),
        (0.0, "0 FLOP"),
    ],
)
def test_a_prefix_leaves_one_digit_or_more(value, shown):
    assert si(value, "FLOP") == shown


def test_small_models_have_milliseconds_and_mebibytes():
    assert [duration(s) for s in (154.321, 1.0, 0.0123)] == ["154.32 s", "1.00 s", "12.30 ms"]
    assert [memory(n) for n in (2.0**30, 12.5 * 2**20)] == ["1.00 GiB", "12.5 MiB"]


def test_one_has_no_plural():
    assert [counted(n, "chip") for n in (1, 4)] == ["1 chip", "4 chips"]
