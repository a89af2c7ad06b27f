"""Where a run lives and what it records there: metrics, signals, its report."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from train.durable.interrupts import Interrupts
from train.durable.metrics import MetricsWriter
from train.durable.place import Place
from train.durable.usage import Usage


@dataclasses.dataclass(frozen=True)
class Home:
    """A run that this process has locked, and what all of its phases use."""

    place: Place
    config: dict[str, Any]
    """The run's settings as JSON, stored beside each checkpoint."""
    metrics: MetricsWriter
    usage: Usage
    interrupts: Interrupts = dataclasses.field(default_factory=Interrupts)
    profile: int = 0
    """Step of each phase to trace; 0: none."""
    check: Callable[[], None] = lambda: None
    """Called before each save, in every process; an exception from it prevents the save."""
    report: Callable[[], None] = lambda: None
    """Writes the report so far; called after each regular save and each evaluation, in every
    process."""

    @property
    def folder(self) -> pathlib.Path:
        """The folder of the run's files, without checkpoints."""
        return self.place.folder
