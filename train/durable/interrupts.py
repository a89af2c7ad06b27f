"""Stops a run cleanly on Ctrl-C or SIGTERM (preemption); the same command then resumes it.

The signal handler only sets a flag, and the training loop checks the flag between steps. Raising an
exception from the handler would be unsafe: it could surface on any line, even one that holds a lock
or runs a callback that swallows exceptions. A second signal ends the process at once. The files are
then in the same state as after SIGKILL, from which a run also resumes.

After SIGTERM the machine may be taken within seconds, and a step may take minutes. A thread
therefore ends the process with a line when its time is over, whatever the main thread is doing.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from paravt_jax.processes import cluster, hosts

_ASKED = b"\nstopping after the current step; signal again to stop at once\n"
# Some launchers signal a process and then its process group. A second signal within this many
# seconds therefore counts as the first one.
REPEAT_SECONDS = 1.0


class Stopped(BaseException):
    """The run stopped on request; the message says what was saved.

    It derives from BaseException, so that no `except Exception` on the way out takes it for an
    error. `code` is the exit code by shell convention, 128 + signal number: 130 for Ctrl-C, 143 for
    SIGTERM.
    """

    def __init__(self, number: int, kept: str):
        # Pickling an exception restores it from these arguments; it is sent to other processes.
        super().__init__(number, kept)
        self.code = 128 + number

    def __str__(self) -> str:
        return self.args[1]


class Interrupts:
    """Context manager that records SIGINT and SIGTERM and restores the old handlers on exit.

    Without entering it, no signal is recorded and every check passes.

    Args:
        grace: Seconds after SIGTERM in which the process has to end; None: as many as it needs.

    Attributes:
        kept: Returns what is saved, for the line of a process that ends because its time is over.
            Called in another thread.
    """

    def __init__(self, grace: float | None = None) -> None:
        self.kept: Callable[[], str] = lambda: "what is finished is kept"
        self._grace = grace
        # Signal number and time of the first signal.
        self._first_signal: tuple[int, float] | None = None
        self._old_handlers: dict[signal.Signals, Any] = {}
        self._terminated: float | None = None
        self._wake: socket.socket | None = None

    def asked(self) -> int | None:
        """The number of the signal that this process received, or None."""
        if self._first_signal is None:
            return None
        return self._first_signal[0]

    def agree(self) -> int | None:
        """The first signal that any process of the run received, or None.

        All processes call it at the same place, so they all stop after the same step.
        """
        # Do not record another process's signal as received here. This process may still get its
        # own, which would then count as the second one and kill it in the middle of a save.
        for number in hosts.gather(self.asked()):
            if number is not None:
                return number
        return None

    def seconds_left(self) -> float | None:
        """Seconds until this process must have ended; None without a SIGTERM or a limit."""
        if self._grace is None or self._terminated is None:
            return None
        return self._terminated + self._grace - time.monotonic()

    def check(self, kept: str) -> None:
        """Raises Stopped on all processes if any of them received a signal.

        Args:
            kept: message of the exception: what is saved and what the next start repeats.
        """
        number = self.agree()
        if number is not None:
            raise Stopped(number, kept)

    def check_alone(self, kept: str) -> None:
        """Like `check`, for a process that works while the others wait for it."""
        number = self.asked()
        if number is not None:
            raise Stopped(number, kept)

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old_handlers[number] = signal.signal(number, self._on_signal)
        if self._grace is not None:
            self._wake, asleep = socket.socketpair()
            self._wake.setblocking(False)
            # The interpreter writes the numbers of signals here at once. Handlers run only when the
            # main thread is back from a program of XLA.
            signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(asleep, self._grace), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._wake is not None:
            signal.set_wakeup_fd(-1)
            self._wake.close()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _watch(self, asleep: socket.socket, grace: float) -> None:
        """Ends the process `grace` seconds after SIGTERM, unless `__exit__` comes first."""
        with asleep:
            while self._terminated is None:
                received = asleep.recv(1)
                if not received:
                    return
                if received[0] == signal.SIGTERM:
                    self._terminated = time.monotonic()
            while (left := self._terminated + grace - time.monotonic()) > 0:
                asleep.settimeout(left)
                try:
                    if not asleep.recv(1):
                        return
                except TimeoutError:
                    break
        try:
            kept = self.kept()
        # Broad because this thread must end the process.
        except Exception as error:
            kept = f"what is saved cannot be listed ({error})"
        cluster.end(
            128 + signal.SIGTERM,
            f"stopped by SIGTERM before the current step had ended, after {grace:g} s; {kept}; "
            "the same command continues from there",
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGTERM and self._terminated is None:
            self._terminated = now
        if self._first_signal is None:
            self._first_signal = (number, now)
            # os.write, because the signal may have interrupted a print, which is not reentrant.
            os.write(2, _ASKED)
        elif now - self._first_signal[1] > REPEAT_SECONDS:
            # The default action ends the process with the exit status of the signal.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
