"""One line about a long piece of work: share done, time left, rate and the figures that matter."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

_LINE = (
    "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
)


class Progress:
    """A bar that overwrites itself on a terminal; elsewhere (a log file) a plain line now and then.

    title: what is done. unit: of what, in the singular. every: seconds between lines of a log.
    shown: False says nothing at all (all but one process of a run).
    """

    def __init__(
        self,
        title: str,
        unit: str = "step",
        every: float = 5.0,
        stream: TextIO | None = None,
        shown: bool = True,
    ):
        self._title, self._unit, self._every = title, unit, every
        self._stream = stream or sys.stderr
        self._shown = shown
        self._bar: _Bar | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, done: int, total: int, figures: Mapping[str, float] | None = None) -> None:
        """Says that `done` of `total` units are finished, with `figures` in their order."""
        if not self._shown:
            return
        figures = dict(figures or {})
        if self._bar is None:
            # The clock starts with the first update: what came before it compiled, or was done by
            # an earlier process.
            self._bar = self._open(done, total, figures)
            return
        self._bar.set_postfix(figures, refresh=False)
        if not self._bar.update(done - self._bar.n) and done >= total:
            self._bar.refresh()

    def close(self) -> None:
        """Ends the line on a terminal, so that what is printed next starts on its own."""
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
    monitor_interval = 0  # no thread of its own: processes are forked while a bar is shown


class _Lines:
    """A log in which each of a bar's updates is a line of its own."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> None:
        if line := text.strip():
            self._stream.write(line + "\n")

    def flush(self) -> None:
        self._stream.flush()
