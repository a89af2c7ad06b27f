"""Ctrl-C and SIGTERM (a preemption) end a run as soon as what is under way is finished and kept; the same command goes on.

Owns the two signals while a run lasts, and the one place where a run, in however many processes, decides that it stops. The first
signal only asks: an exception out of a signal handler could hit any line, one that holds a lock or a callback that loses it. A second
one ends the process at once; what it leaves behind is what a kill leaves behind.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any

from train.durable import hosts

_ASKED = (
    b"\nstopping: what is under way is finished and kept first; once more ends it without waiting\n"
)
_SAME = 1.0  # seconds in which a second signal is the first one once more: some launchers signal a process and its group


class Stopped(BaseException):
    """The run was asked to stop, and its message says what is kept. No `Exception`: nobody may take it for an error on its way out.

    `code` is the exit code by the custom of shells, 128 and the signal's number: 130 by a person (Ctrl-C), 143 by preemption (SIGTERM).
    """

    def __init__(self, number: int, kept: str):
        super().__init__(number, kept)  # both, so that it can be pickled for the other processes
        self.code = 128 + number

    def __str__(self) -> str:
        return self.args[1]


class Interrupts:
    """Hears both signals; a context manager that puts the old handlers back. Outside of one nobody ever asks to stop."""

    def __init__(self) -> None:
        self._asked: tuple[int, float] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def asked(self) -> int | None:
        """The signal by which this process was asked to stop."""
        return self._asked and self._asked[0]

    def agree(self) -> int | None:
        """The signal by which the run has to stop: the first that any of its processes heard. All of them call it at the same place, so
        all stop there."""
        # Another's signal is not made this one's own: its own may still come, and must not end it in the middle of a save.
        return next((number for number in hosts.gather(self.asked()) if number is not None), None)

    def check(self, kept: str) -> None:
        """Raises Stopped if the run has to stop, which all processes ask at the same place; `kept` says what is on disk by now, and what
        the next start does again."""
        if (number := self.agree()) is not None:
            raise Stopped(number, kept)

    def check_alone(self, kept: str) -> None:
        """`check` where this process works while the others wait for it."""
        if (number := self.asked()) is not None:
            raise Stopped(number, kept)

    def __enter__(self) -> Interrupts:
        self._before = {
            number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked is None:
            self._asked = number, now
            os.write(2, _ASKED)  # print may be what the signal interrupts
        elif now - self._asked[1] > _SAME:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
