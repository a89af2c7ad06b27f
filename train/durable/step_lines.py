"""Prints a line per step of a phase.

    cold start 120/500 · loss 0.812 · 31.2 s · 4,204 tok/s · MFU 38.1 % · 3 h 17 min left
    PARA-GRPO 12/54 · reward 0.93 · accuracy 0.61 · compliance 0.84 · calls 1.90 · 118 s · ...

A terminal and a log file get the same plain lines.
"""

from __future__ import annotations

import sys
from typing import Any

from train.durable.metrics import PHASE_TITLES, format_seconds

Row = dict[str, Any]

EVERY = 1.0
"""Seconds between two lines at least, so that logs of short steps stay readable."""

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


class StepLines:
    """The lines of one phase in one process.

    Args:
        steps: Number of its steps.
    """

    def __init__(self, steps: int):
        self._steps = steps
        # The first step of a process compiles, so only those after it tell how long a step takes,
        # with saves and evaluations between.
        self._first: Row | None = None
        self._printed = 0.0

    def add(self, row: Row) -> None:
        """Print the line of the step with this line of metrics.jsonl, if one is due."""
        first = self._first = self._first or row
        left, done = self._steps - row["step"], row["step"] - first["step"]
        if left and row["wall"] - self._printed < EVERY:
            return
        self._printed = row["wall"]
        text = ""
        if left and done:
            text = f"{format_seconds(left * (row['wall'] - first['wall']) / done)} left"
        say(step_line(row, self._steps, text))


def step_seconds(row: Row) -> float:
    """Return the measured duration of a step."""
    return sum(value or 0.0 for name, value in row.items() if name.startswith("time/"))


def say(line: str) -> None:
    """Print a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)
