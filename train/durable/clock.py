"""Total running time of a run, summed over all its starts, and the time since the first one.

seconds.json
{"running": 5025.3, "began": 1798761600.0}
"""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable

from typing_extensions import TypedDict

from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.stored_json import read_json
from paravt_jax.processes import hosts
from train.durable.metrics import format_seconds


class _Times(TypedDict):
    running: float
    """Seconds of all starts."""
    began: float
    """Unix time of the first start."""


def read_seconds(file: pathlib.Path) -> float:
    """The seconds of all starts, 0 if there was none.

    Raises:
        DamagedFileError: the file holds something else.
    """
    return _read(file)["running"]


def _read(file: pathlib.Path, now: float = 0.0) -> _Times:
    if not file.exists():
        return {"running": 0.0, "began": now}
    times = read_json(file, float | _Times, "delete it, and time counts anew")
    if isinstance(times, dict):
        return {"running": times["running"], "began": times["began"]}
    # Earlier versions wrote the seconds alone.
    return {"running": times, "began": now - times}


def in_words(seconds: float, file: pathlib.Path) -> str:
    """The seconds of a start, and those of all starts in `file` if there were earlier ones."""
    total = read_seconds(file)
    # The file does not have the time before the clock started, so a single start has less.
    in_all = f" ({format_seconds(total)} in all)" if total > seconds else ""
    return format_seconds(seconds) + in_all


class Clock:
    """Adds the seconds of this start to the seconds of earlier starts, which `file` stores.

    As a context manager it saves the total on entry and exit.

    Args:
        file: where times are stored.
        now: the Unix time.
        ticks: seconds since some moment.
    """

    def __init__(
        self,
        file: pathlib.Path,
        now: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ):
        self._file = file
        self._now = now
        self._ticks = ticks
        self._start = ticks()
        times = _read(file, now())
        self._earlier = times["running"]
        self._began = times["began"]

    @property
    def total(self) -> float:
        """Seconds of all starts so far, this one included."""
        return self._earlier + self._ticks() - self._start

    @property
    def since_began(self) -> float:
        """Seconds since the first start, in which the run may have been stopped for a while."""
        # The clock of another machine may be behind.
        return max(self._now() - self._began, self.total)

    def save(self) -> None:
        """Stores the times. In a multi-host run only the first process writes."""
        if hosts.is_first():
            times: _Times = {"running": self.total, "began": self._began}
            write_atomically(self._file, json.dumps(times))

    def __enter__(self) -> Clock:
        self.save()
        return self

    def __exit__(self, *_: object) -> None:
        self.save()
