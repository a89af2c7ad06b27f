"""Prints a line per step of a phase, and a line when something deserves a look.

    cold start 120/500 · loss 0.812 · 31.2 s · 4,204 tok/s · MFU 38.1 % · 3 h 17 min left
    PARA-GRPO 12/54 · reward 0.93 · accuracy 0.61 · compliance 0.84 · calls 1.90 · 118 s · ...

A terminal and a log file get the same plain lines.
"""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from paravt_jax.data.any_path import AnyPath
from train.durable.metrics import PHASE_TITLES, format_seconds
from train.durable.watch import Watch, disk_fills, room_for_checkpoint, step_seconds

Row = dict[str, Any]

EVERY = 1.0
"""Seconds between two lines at least, so that logs of short steps stay readable."""

RECENT = 20
"""Steps whose mean is the expected time of the next ones."""

_FIGURES = {
    "reward/total": "reward {:.2f}",
    "loss": "loss {:#.3g}",
    "accuracy": "accuracy {:.2f}",
    "compliance": "compliance {:.2f}",
    "calls": "calls {:.2f}",
}
_SPEEDS = {
    "speed/tokens": ("{:,.0f} tok/s", 1.0),
    "speed/mfu": ("MFU {:.1f} %", 100.0),
}


def step_line(row: Row, steps: int, left: str) -> str:
    """The line of a step.

    Args:
        row: The step's line of metrics.jsonl.
        steps: Number of steps of the phase.
        left: The time left in words; may be empty.
    """
    parts = [f"{PHASE_TITLES[row['phase']]} {row['step']}/{steps}"]
    for name, text in _FIGURES.items():
        # The loss of RL is near 0 by construction: its reward says more.
        hidden = name == "loss" and "reward/total" in row
        if row.get(name) is not None and not hidden:
            parts.append(text.format(row[name]))
    seconds = step_seconds(row)
    # Three digits: 0.59 s, 31.2 s, 118 s.
    digits = 2 if seconds < 10 else 1 if seconds < 100 else 0
    parts.append(f"{seconds:,.{digits}f} s")
    for name, (text, scale) in _SPEEDS.items():
        if row.get(name) is not None:
            parts.append(text.format(scale * row[name]))
    if left:
        parts.append(left)
    return " · ".join(parts)


def rows_line(phase: str, lengths: Sequence[int], seconds: float) -> str:
    """The line after a phase has compiled its programs for packed rows.

    Args:
        phase: Name of the phase.
        lengths: Lengths of the rows, in tokens.
        seconds: Time that compiling took.
    """
    *others, last = [f"{length:,}" for length in lengths]
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"{PHASE_TITLES[phase]}: rows of {listed} tokens, compiled in {format_seconds(seconds)}"


class StepLines:
    """The lines of one phase in one process.

    Args:
        phase: Name of the phase.
        steps: Number of its steps.
        earlier: Lines of metrics.jsonl of its steps in earlier processes.
        checkpoints: Folder of its checkpoints.
        clock: Seconds since some moment.
    """

    def __init__(
        self,
        phase: str,
        steps: int,
        earlier: Sequence[Row],
        checkpoints: AnyPath,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._phase = phase
        self._steps = steps
        self._first = earlier[-1]["step"] + 1 if earlier else 1
        # Unix times at which the last steps of this process ended.
        self._ends: collections.deque[float] = collections.deque(maxlen=RECENT + 1)
        self._checkpoints = checkpoints
        self._clock = clock
        self._printed: float | None = None
        self._watch = Watch(phase)
        for row in earlier:
            self._watch.add(row)
        self._disk_warned = False

    def begin(self) -> None:
        """Print which step comes next. It compiles, so its line may take minutes to come."""
        name = PHASE_TITLES[self._phase]
        say(f"{name} {self._first}/{self._steps} is next; the first step after a start compiles")

    def add(self, row: Row) -> None:
        """Print what there is to say about the step with this line of metrics.jsonl."""
        self._ends.append(row["wall"])
        for warning in self._watch.add(row):
            say(f"warning: {warning}")
        now = self._clock()
        is_due = self._printed is None or now - self._printed >= EVERY
        if not is_due and row["step"] != self._steps:
            return
        self._printed = now
        left = self._steps - row["step"]
        say(step_line(row, self._steps, self._time_left(left)))
        if left:
            self._watch_disk()

    def _time_left(self, steps: int) -> str:
        """The time left of the phase in words; "" if nothing is left, or nothing tells it yet.

        A step takes from its end to the end of the next one, with saves and evaluations between.
        The first step of a process compiles, so it does not count.
        """
        if not steps or len(self._ends) < 2:
            return ""
        usual = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return f"{format_seconds(max(0.0, steps * usual))} left"

    def _watch_disk(self) -> None:
        """Warn once if the next checkpoint does not fit, and again after it did fit."""
        room = room_for_checkpoint(self._checkpoints)
        if room is None:
            return
        warning = disk_fills(*room)
        if warning is not None and not self._disk_warned:
            say(f"warning: {warning}")
        self._disk_warned = warning is not None


def say(line: str) -> None:
    """Print a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)
