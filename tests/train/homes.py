"""Homes of runs whose steps are recorded without a model."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from train.durable.checkpoint import Checkpoints
from train.durable.metrics import MetricsWriter
from train.durable.run_folder import RunFolder
from train.durable.saver import Home, Saver
from train.durable.usage import Usage


@dataclasses.dataclass(frozen=True)
class Steps:
    """When a phase is saved."""

    steps: int
    save_every: int


def open_home(folder: pathlib.Path, **fields: Any) -> Home:
    """The home of a run in a folder."""
    metrics = MetricsWriter(folder)
    home = Home(RunFolder(folder), {}, metrics, Usage())
    return dataclasses.replace(home, **fields)


def open_phase(
    name: str, home: Home, steps: Steps, identity: dict[str, Any] | None = None
) -> Saver:
    """A phase of a run whose checkpoints are beside the other files."""
    kept = Checkpoints(home.folder / name, asynchronous=True, identity=identity)
    return Saver(name, steps, home, kept, {"config": 1})
