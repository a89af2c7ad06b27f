"""What the check looks at: a run, its folder, and the answers of servers."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from paravt_extras.check.asking import Asked
from paravt_extras.slices import Devices
from paravt_jax.data.any_path import is_bucket
from train.durable.place import Place, open_place
from train.settings import Run


@dataclasses.dataclass(frozen=True)
class Subject:
    """A run to check on this host."""

    run: Run
    settings: dict[str, Any]
    """The settings that define the run, as its folder stores them."""
    folder: pathlib.Path
    """The folder of its files; for a run in a bucket, the local one."""
    asked: Asked
    topology: str = ""
    """A TPU slice to check for instead of this host's devices."""
    devices: Devices | None = None
    """The devices of all hosts, once several have joined; None: a process asks JAX alone."""

    @property
    def place(self) -> Place:
        """Where the run lives."""
        return open_place(self.run.run_dir if is_bucket(self.run.run_dir) else self.folder)


def existing(path: pathlib.Path) -> pathlib.Path:
    """The nearest folder above `path`, or `path` itself, that exists."""
    path = path.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path
