"""Prints a line per step of a phase.

    cold start 120/500 · loss 0.812 · 31.2 s · 4,204 tok/s · MFU 38.1 % · 3 h 17 min left
    PARA-GRPO 12/54 · reward 0.93 · accuracy 0.61 · compliance 0.84 · calls 1.90 · 118 s · ...

A terminal and a log file get the same plain lines.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Sequence
from typing import Any

from train.durable.metrics import PHASE_TITLES, format_seconds

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
    """Return the line of a step.

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
    """Return the line after a phase has compiled its programs for packed rows.

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
        steps: Number of its steps.
    """

    def __init__(self, steps: int):
        self._steps = steps
        # Unix times at which the last steps ended.
        self._ends: collections.deque[float] = collections.deque(maxlen=RECENT + 1)
        self._printed = 0.0

    def add(self, row: Row) -> None:
        """Print the line of the step with this line of metrics.jsonl, if one is due."""
        self._ends.append(row["wall"])
        left = self._steps - row["step"]
        if left and row["wall"] - self._printed < EVERY:
            return
        self._printed = row["wall"]
        say(step_line(row, self._steps, self._time_left(left)))

    def _time_left(self, steps: int) -> str:
        """Return the time left in words; "" if nothing is left, or nothing tells it yet.

        A step takes from its end to the end of the next one, with saves and evaluations between.
        The first step of a process compiles, so it does not count.
        """
        if not steps or len(self._ends) < 2:
            return ""
        usual = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return f"{format_seconds(max(0.0, steps * usual))} left"


def step_seconds(row: Row) -> float:
    """Return the measured duration of a step."""
    return sum(value or 0.0 for name, value in row.items() if name.startswith("time/"))


def say(line: str) -> None:
    """Print a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)
