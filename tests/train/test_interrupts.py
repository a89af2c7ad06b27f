"""Stopping a run: at the next check when asked once, at once when asked twice."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from train.durable.interrupts import Interrupts, Stopped

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_stops_at_the_next_check_with_a_code_of_its_own(number, code, capfd):
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        interrupts.check("nothing yet")
        assert interrupts.asked() is None
        signal.raise_signal(number)
        assert interrupts.asked() == number and "finished and kept first" in capfd.readouterr().err
        signal.raise_signal(number)  # a launcher that signals the process and its group
        with pytest.raises(Stopped, match="^all of it is kept$") as stop:
            interrupts.check("all of it is kept")
        assert stop.value.code == code and not isinstance(stop.value, Exception)
    assert signal.getsignal(number) is before


TWICE = """
import os, signal, sys, train.durable.interrupts as module
module._SAME = 0.0
with module.Interrupts():
    os.kill(os.getpid(), int(sys.argv[1]))
    print("still here", flush=True)
    os.kill(os.getpid(), int(sys.argv[1]))
    print("too long", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_ends_it_at_once(number):
    done = subprocess.run(
        [sys.executable, "-c", TWICE, str(int(number))],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (-number, "still here\n"), done.stderr


def test_the_handlers_come_back_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(OSError), Interrupts():
        raise OSError
    assert signal.getsignal(signal.SIGINT) is before
