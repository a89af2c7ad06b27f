"""What the check looks at: a run, its folder, and the answers of servers."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from train.check.asking import Asked
from train.settings import Run
from train.slices import Devices


@dataclasses.dataclass(frozen=True)
class Subject:
    """A run to check on this host."""

    run: Run
    settings: dict[str, Any]
    """The settings that define the run, as its folder stores them."""
    folder: pathlib.Path
    asked: Asked
    topology: str = ""
    """A TPU slice to check for instead of this host's devices."""
    devices: Devices | None = None
    """The devices of all hosts, once several have joined; None: a process asks JAX alone."""


def existing(path: pathlib.Path) -> pathlib.Path:
    """The nearest folder above `path`, or `path` itself, that exists."""
    path = path.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path
