"""The seconds that a run has taken, over all its processes."""

from __future__ import annotations

import json
import pathlib
import time

from paravt_jax.data.atomic import write_atomically
from train.durable import hosts


class Clock:
    """Counts from what earlier processes left in `file`; a context manager that saves at its end."""

    def __init__(self, file: pathlib.Path):
        self._file, self._start = file, time.monotonic()
        self._earlier = json.loads(file.read_text()) if file.exists() else 0.0

    @property
    def total(self) -> float:
        return self._earlier + time.monotonic() - self._start

    def save(self) -> None:
        if hosts.is_first():
            write_atomically(self._file, json.dumps(self.total))

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, *_: object) -> None:
        self.save()
