"""Shows progress on one line: fraction done, time left, rate and the latest figures."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

_LINE = (
    "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
)


class Progress:
    """A line on a terminal that is drawn again and again; lines at intervals in a log file.

    Args:
        title: Name of the work.
        unit: Name of one unit of work, in the singular.
        every: Seconds between lines in a log.
        shown: Whether to print. In a run of several processes, only one does.

    >>> with Progress("rl") as progress:
    ...     progress.update(1, 100, {"reward": 0.5})
    """

    def __init__(self, title: str, unit: str = "step", every: float = 5.0, shown: bool = True):
        self._title = title
        self._unit = unit
        self._shown = shown
        self._on_terminal = sys.stderr.isatty()
        self._every = 0.1 if self._on_terminal else every
        self._printed = -math.inf
        # Seconds and units at the first update. Time before that is compilation, and units before
        # it were done by an earlier process.
        self._first: tuple[float, int] | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """End the line on a terminal, so that later output starts on a new one."""
        if self._on_terminal and self._first is not None:
            print(file=sys.stderr)

    def update(self, done: int, total: int, figures: Mapping[str, float] | None = None) -> None:
        """Report that `done` of `total` units are finished, with the latest `figures`."""
        now = time.monotonic()
        if not self._shown or (done < total and now - self._printed < self._every):
            return
        self._printed = now
        began, before = self._first = self._first or (now, done)
        line = tqdm.format_meter(
            done,
            total,
            now - began,
            prefix=self._title,
            unit=self._unit,
            bar_format=_LINE,
            postfix=", ".join(f"{name}={value:.3g}" for name, value in (figures or {}).items()),
            initial=before,
        )
        # The escape sequence clears the rest of the line.
        text = f"\r{line}\x1b[K" if self._on_terminal else f"{line}\n"
        print(text, end="", file=sys.stderr, flush=True)
