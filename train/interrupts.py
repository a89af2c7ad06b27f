"""Ctrl-C and SIGTERM (a preemption) stop a run; the same command goes on.

Owns the two signals while a run lasts. An exception raised by a signal is lost where it hits a callback out of C++; `check`, which
the run calls at every step, raises it again.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class Interrupts:
    """Turns both signals into KeyboardInterrupt, at once or at the next `check`; a context manager that puts the old handlers back."""

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[signal.Signals, Any] = {}

    def check(self) -> None:
        """Raises KeyboardInterrupt if the run was asked to stop."""
        if self._asked:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        raise KeyboardInterrupt
