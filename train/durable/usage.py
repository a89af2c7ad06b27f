"""What a run uses besides its steps: memory of the devices, seconds of compiling, and goodput.

Goodput is the share of the wall time since the run began that went into steps that count. A step
counts if its metrics are in metrics.jsonl: what a killed run repeats is removed there. Of a step,
its parts count (`time/...`) without compiling and without waiting for files and other hosts. So
these are lost: starting, compiling, waiting, evaluating, saving, steps that are repeated, and the
time between two starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from models.device_memory import used_memory
from paravt_jax.processes import hosts
from train.durable.clock import Clock
from train.durable.compilations import Compilations

_WAITING = ("idle/files", "idle/hosts")


class Usage:
    """The metrics of a step that are the same in every phase.

    Args:
        clock: The run's clock.
    """

    def __init__(self, clock: Clock):
        self._clock = clock
        self._compilations = Compilations()
        self._programs = 0
        self._compiled = 0.0
        self._counted = 0.0

    def resume(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Count the steps of earlier phases and processes.

        Args:
            rows: The lines of metrics.jsonl, without steps that are repeated.
        """
        # Earlier versions did not record it.
        self._counted = sum(row.get("goodput/seconds", 0.0) for row in rows)

    def metrics(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Memory, compiling since the step before, and goodput. All processes call this.

        Args:
            figures: The other metrics of the step.
        """
        compiled = self._compilations.seconds - self._compiled
        programs = self._compilations.count - self._programs
        self._compiled, self._programs = self._compilations.seconds, self._compilations.count
        counted = counted_seconds(figures, compiled)
        self._counted += counted
        return _memory() | {
            "compile/seconds": compiled,
            "compile/programs": float(programs),
            "goodput/seconds": counted,
            "goodput/share": self._counted / self._clock.since_began,
        }


def counted_seconds(figures: Mapping[str, float], compiled: float) -> float:
    """The seconds of a step that count towards goodput.

    Args:
        figures: The metrics of the step.
        compiled: Seconds of compiling since the step before. Of RL it is known how many of them lie
            within the step.
    """
    parts = sum(seconds for name, seconds in figures.items() if name.startswith("time/"))
    waited = sum(figures.get(name, 0.0) for name in _WAITING)
    return max(0.0, parts - waited - figures.get("idle/compile", compiled))


def _memory() -> dict[str, float]:
    """GiB of the device that has most in use, and had at most; nothing where JAX has no counts."""
    found = [used for part in hosts.gather(used_memory(jax.local_devices())) for used in part]
    if not found:
        return {}
    return {
        "memory/in_use": max(used for used, _ in found) / 2**30,
        "memory/peak": max(peak for _, peak in found) / 2**30,
    }
