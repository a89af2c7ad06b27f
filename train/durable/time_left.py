"""Estimates how long a phase still takes, from the recorded steps.

The time of a step is the span from its end to the end of the next one. It includes what happens
between two updates: saving, waiting for data, evaluations during RL.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from train.durable.metrics import format_seconds

Row = dict[str, Any]

RECENT = 20
"""Steps whose mean is the expected time of the next ones, unless checkpoints are further apart."""


def usual_step(rows: Sequence[Row]) -> float | None:
    """Seconds per step of a phase as other processes ran it; None for fewer than two steps.

    Args:
        rows: The phase's lines of metrics.jsonl.
    """
    spans = _spans(rows)[-RECENT:]
    # The median, because a run that was stopped and resumed has long pauses between two steps.
    return statistics.median(spans) if spans else None


def expected_step(rows: Sequence[Row], first: int, save_every: int) -> float | None:
    """Seconds that a step of the current phase is expected to take; None if nothing tells it yet.

    Args:
        rows: The phase's lines of metrics.jsonl.
        first: The first step of this process. It compiles, so it does not count.
        save_every: Steps between checkpoints. The mean covers at least one of them.
    """
    spans = _spans([row for row in rows if row["step"] >= first])
    if not spans:
        return usual_step(rows)
    return statistics.mean(spans[-max(RECENT, save_every) :])


def _spans(rows: Sequence[Row]) -> list[float]:
    """Seconds between the ends of successive steps."""
    return [max(0.0, after["wall"] - row["wall"]) for row, after in itertools.pairwise(rows)]


def time_left(steps: int, step_seconds: float | None) -> str:
    """The time left of a phase in words; "" if nothing is left or known.

    Args:
        steps: Steps of the phase that are left.
        step_seconds: Expected duration of one of them.
    """
    if not steps or step_seconds is None:
        return ""
    return f"{format_seconds(steps * step_seconds)} left"
