"""Homes of runs whose steps are recorded without a model."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from train.durable.metrics import MetricsWriter
from train.durable.run_folder import RunFolder
from train.durable.saver import Home, Saver


def open_home(folder: pathlib.Path, **fields: Any) -> Home:
    """The home of a run in a folder."""
    metrics = MetricsWriter(folder)
    home = Home(RunFolder(folder), {"rl": {"optimizer": {"learning_rate": 1.0}}}, metrics)
    return dataclasses.replace(home, **fields)


def open_phase(name: str, home: Home, steps: int, save_every: int) -> Saver:
    """A phase of a run without a model."""
    return Saver(name, steps, save_every, home, origin={})
