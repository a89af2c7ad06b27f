"""Stopping a run: at the next check when asked once, at once when asked twice."""

from __future__ import annotations

import signal

import pytest

from train.interrupts import Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_at_the_next_check_and_the_second_at_once(number, capfd):
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        interrupts.check()
        signal.raise_signal(number)
        assert "stopping after this step" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_the_handlers_come_back_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(OSError), Interrupts():
        raise OSError
    assert signal.getsignal(signal.SIGINT) is before
