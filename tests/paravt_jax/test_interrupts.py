"""Stopping a run: the first signal stops it at the next check, the second one at once."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from paravt_jax.processes.exit_codes import Stopped
from paravt_jax.processes.interrupts import Interrupts

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
import os, signal, sys, paravt_jax.processes.interrupts as module
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
