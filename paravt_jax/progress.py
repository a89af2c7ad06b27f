"""Shows progress on one line: fraction done, time left, rate and the latest figures.

`size` writes numbers of bytes.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

_LINE = (
    "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
)


class Progress:
    """A progress bar on a terminal; plain lines at intervals elsewhere, such as in a log file.

    Args:
        title: Name of the work, shown before the bar.
        unit: Name of one unit of work, in the singular.
        every: Seconds between lines in a log.
        stream: Where to write; stderr by default.
        shown: Whether to print. In a run of several processes, only one does.

    >>> with Progress("rl") as progress:
    ...     progress.update(1, 100, {"reward": 0.5})
    """

    def __init__(
        self,
        title: str,
        unit: str = "step",
        every: float = 5.0,
        stream: TextIO | io.TextIOBase | None = None,
        shown: bool = True,
    ):
        self._title = title
        self._unit = unit
        self._every = every
        self._stream = stream or sys.stderr
        self._shown = shown
        self._bar: _Bar | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, done: int, total: int, figures: Mapping[str, float] | None = None) -> None:
        """Report that `done` of `total` units are finished, with the latest `figures`."""
        if not self._shown:
            return
        figures = dict(figures or {})
        if self._bar is None:
            # The rate is measured from the first update on. Time before that is compilation, and
            # units before it were done by an earlier process.
            self._bar = self._open(done, total, figures)
            return
        self._bar.set_postfix(figures, refresh=False)
        # tqdm skips a redraw that follows the last one too soon. The final state is always drawn.
        if not self._bar.update(done - self._bar.n) and done >= total:
            self._bar.refresh()

    def close(self) -> None:
        """End the line on a terminal, so that later output starts on a new one."""
        if self._bar is not None:
            self._bar.close()

    def _open(self, done: int, total: int, figures: dict[str, float]) -> _Bar:
        on_terminal = self._stream.isatty()
        return _Bar(
            desc=self._title,
            initial=done,
            total=total,
            unit=self._unit,
            postfix=figures,
            file=self._stream if on_terminal else _Lines(self._stream),
            mininterval=0.1 if on_terminal else self._every,
            miniters=1,
            dynamic_ncols=on_terminal,
            bar_format=None if on_terminal else _LINE,
            leave=on_terminal,
        )


class _Bar(tqdm):
    monitor_interval = 0  # no monitoring thread: processes are forked while a bar is shown


class _Lines:
    """A text stream for tqdm that writes each update as a line."""

    def __init__(self, stream: TextIO | io.TextIOBase):
        self._stream = stream

    def write(self, text: str) -> None:
        line = text.strip()
        if line:
            self._stream.write(line + "\n")

    def flush(self) -> None:
        self._stream.flush()


def size(count: float) -> str:
    """Return a number of bytes in decimal units: "17.5 GB", "320 MB"."""
    if count >= 1e9:
        return f"{count / 1e9:,.1f} GB" if count < 1e11 else f"{count / 1e9:,.0f} GB"
    if count >= 1e6:
        return f"{count / 1e6:.0f} MB"
    return f"{count / 1e3:.0f} kB"
