"""Ctrl-C and SIGTERM (a preemption) stop a run between two steps; the same command goes on.

Owns the two signals while a run lasts. The first only asks: it is answered by `check`, which the run calls at every step. An exception
out of a signal handler could hit any line, one that holds a lock or a callback that loses it, so only a second signal raises one.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

_ASKED = b"\nstopping after this step; once more stops at once\n"


class Interrupts:
    """Turns both signals into KeyboardInterrupt at the next `check`; a context manager that puts the old handlers back."""

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
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        os.write(2, _ASKED)  # print may be what the signal interrupts
