"""Stopping a run: the first signal stops it at the next check, the second one at once."""

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
def test_the_first_signal_stops_at_the_next_check_with_its_own_exit_code(number, code, capfd):
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        interrupts.check("nothing yet")
        assert interrupts.asked() is None
        signal.raise_signal(number)
        assert interrupts.asked() == number
        assert "stopping after the current step" in capfd.readouterr().err
        # Some launchers signal a process and then its group: that is still the first signal.
        signal.raise_signal(number)
        with pytest.raises(Stopped, match="^all is saved$") as stop:
            interrupts.check("all is saved")
        assert stop.value.code == code
        assert not isinstance(stop.value, Exception)
    assert signal.getsignal(number) is before


TWICE = """
import os, signal, sys, train.durable.interrupts as module
module.REPEAT_SECONDS = 0.0
with module.Interrupts():
    os.kill(os.getpid(), int(sys.argv[1]))
    print("still here", flush=True)
    os.kill(os.getpid(), int(sys.argv[1]))
    print("too long", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_process_at_once(number):
    done = subprocess.run(
        [sys.executable, "-c", TWICE, str(int(number))],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (-number, "still here\n"), done.stderr


# The main thread is inside a C function that signals do not interrupt, like a program of XLA.
BUSY = """
import hashlib, os, signal, threading, time, train.durable.interrupts as module
with module.Interrupts(grace={grace}) as interrupts:
    interrupts.kept = lambda: "the last checkpoint is 3/7"
    for delay in {delays}:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGTERM)).start()
    {work}
print("the step has ended")
"""
LONG = 'hashlib.pbkdf2_hmac("sha256", b"", b"", (1 << 31) - 1)'
SHORT = "while interrupts.asked() is None: time.sleep(0.01)"


def terminated(work: str, grace: float, *delays: float) -> subprocess.CompletedProcess[str]:
    """A process that gets SIGTERM after each delay, while it does some work."""
    program = BUSY.format(work=work, grace=grace, delays=delays)
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_sigterm_ends_a_step_that_takes_too_long_with_a_line():
    done = terminated(LONG, 0.5, 0.2)
    assert done.returncode == 143
    assert done.stderr.splitlines() == [
        "stopped by SIGTERM before the current step had ended, after 0.5 s; the last checkpoint is "
        "3/7; the same command continues from there"
    ]


def test_sigterm_lets_a_short_step_end():
    done = terminated(SHORT, 60.0, 0.2)
    assert (done.returncode, done.stdout) == (0, "the step has ended\n"), done.stderr


def test_a_second_signal_does_not_prolong_the_grace():
    assert terminated(LONG, 1.0, 0.2, 0.7).returncode == 143


def test_only_sigterm_limits_the_time():
    with Interrupts(grace=30) as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.seconds_left() is None
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.seconds_left() is None


def test_the_old_handlers_are_restored_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(OSError), Interrupts():
        raise OSError
    assert signal.getsignal(signal.SIGINT) is before
