"""Stops a run cleanly on Ctrl-C or SIGTERM (preemption); the same command then resumes it.

The signal handler only sets a flag, and the training loop checks the flag between steps. Raising an
exception from the handler would be unsafe: it could surface on any line, even one that holds a lock
or runs a callback that swallows exceptions. A second signal ends the process at once. The files are
then in the same state as after SIGKILL, from which a run also resumes.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any

from paravt_jax.processes import hosts
from paravt_jax.processes.exit_codes import Stopped

_ASKED = b"\nstopping after the current step; signal again to stop at once\n"
# Some launchers signal a process and then its process group. A second signal within this many
# seconds therefore counts as the first one.
REPEAT_SECONDS = 1.0


class Interrupts:
    """Context manager that records SIGINT and SIGTERM and restores the old handlers on exit.

    Without entering it, no signal is recorded and every check passes.
    """

    def __init__(self) -> None:
        # Signal number and time of the first signal.
        self._first_signal: tuple[int, float] | None = None
        self._old_handlers: dict[signal.Signals, Any] = {}

    def asked(self) -> int | None:
        """Return the number of the signal that this process received, or None."""
        return None if self._first_signal is None else self._first_signal[0]

    def agree(self) -> int | None:
        """Return the first signal that any process of the run received, or None.

        All processes call it at the same place, so they all stop after the same step.
        """
        # Do not record another process's signal as received here. This process may still get its
        # own, which would then count as the second one and kill it in the middle of a save.
        for number in hosts.gather(self.asked()):
            if number is not None:
                return number
        return None

    def check(self, kept: str) -> None:
        """Raise Stopped on all processes if any of them received a signal.

        Args:
            kept: message of the exception: what is saved and what the next start repeats.
        """
        number = self.agree()
        if number is not None:
            raise Stopped(number, kept)

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_signal is None:
            self._first_signal = (number, now)
            # os.write, because the signal may have interrupted a print, which is not reentrant.
            os.write(2, _ASKED)
        elif now - self._first_signal[1] > REPEAT_SECONDS:
            # The default action ends the process with the exit status of the signal.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
