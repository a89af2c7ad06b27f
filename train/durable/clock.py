"""Total running time of a run, summed over all its starts."""

from __future__ import annotations

import json
import pathlib
import time

from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.stored_json import read_json
from paravt_jax.processes import hosts
from train.durable.metrics import format_seconds


def read_seconds(file: pathlib.Path) -> float:
    """The seconds of all starts, 0 if there was none.

    Raises:
        DamagedFileError: the file holds no number.
    """
    return read_json(file, float, "delete it, and time counts anew") if file.exists() else 0.0


def in_words(seconds: float, file: pathlib.Path) -> str:
    """The seconds of a start, and those of all starts in `file` if there were earlier ones."""
    total = read_seconds(file)
    # The file does not have the time before the clock started, so a single start has less.
    in_all = f" ({format_seconds(total)} in all)" if total > seconds else ""
    return format_seconds(seconds) + in_all


class Clock:
    """Adds the seconds of this start to the seconds of earlier starts, which `file` stores.

    As a context manager it saves the total on exit.
    """

    def __init__(self, file: pathlib.Path):
        self._file = file
        self._start = time.monotonic()
        self._earlier = read_seconds(file)

    @property
    def total(self) -> float:
        """Seconds of all starts so far, this one included."""
        return self._earlier + time.monotonic() - self._start

    def save(self) -> None:
        """Stores the total. In a multi-host run only the first process writes."""
        if hosts.is_first():
            write_atomically(self._file, json.dumps(self.total))

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, *_: object) -> None:
        self.save()
