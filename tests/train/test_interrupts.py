"""Stopping a run: at once where Python runs, at the next check where the exception was lost."""

from __future__ import annotations

import signal

import pytest

from train.interrupts import Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_once_and_a_lost_one_at_the_next_check(number):
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        # Here somebody swallowed it.
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert signal.getsignal(number) is before


def test_the_handlers_come_back_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(OSError), Interrupts():
        raise OSError
    assert signal.getsignal(signal.SIGINT) is before
