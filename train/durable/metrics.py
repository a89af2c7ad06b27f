"""Records the metrics of a run: metrics.jsonl and TensorBoard.

Prints a line per step as well, the same on a terminal and in a log file:

    cold start 120/500 · loss 0.812 · 4,204 tok/s · MFU 38.1% · 31.2 s · 3:17:04 left
    PARA-GRPO 12/54 · reward 0.93 · accuracy 0.61 · compliance 0.84 · calls 1.90 · 1,530 tok/s · ...

metrics.jsonl is the source of all other records. It holds each step once and the phases in order,
however often a run is killed: a resumed run first removes the lines after its checkpoint. In a
multi-host run only the first process writes.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, SupportsFloat

import jax
from tqdm import tqdm
from typing_extensions import TypedDict

from models.devices import used_memory
from paravt_jax.data.stored import parse_json, write_atomically
from paravt_jax.processes import hosts

PHASE_TITLES = {
    "align": "alignment",
    "sft": "cold start",
    "rl": "PARA-GRPO",
}
PHASES = tuple(PHASE_TITLES)

MEASURED = ("wall", "time/", "speed/", "memory/")
"""Prefixes of metrics that tell how the machine did, and so differ between two equal runs."""

_REMEDY = "restore the file from a backup"

EVERY = 1.0
"""Seconds between two printed lines at least, so that logs of short steps stay readable."""

_SHOWN = {
    "reward/total": "reward {:.2f}",
    "loss": "loss {:#.3g}",
    "accuracy": "accuracy {:.2f}",
    "compliance": "compliance {:.2f}",
    "calls": "calls {:.2f}",
    "speed/tokens": "{:,.0f} tok/s",
    "speed/mfu_update": "MFU {:.1%}",
    "speed/mfu_reference": "reference MFU {:.1%}",
}


class _Line(TypedDict):
    """What every line of metrics.jsonl has, beside the step's metrics."""

    phase: Literal["align", "sft", "rl"]
    step: int
    wall: float


def read_jsonl(path: str | os.PathLike[str], kind: Any = dict[str, Any]) -> list[dict[str, Any]]:
    """Read a JSON-lines file; returns [] if there is none.

    An incomplete last line is skipped: the writer was killed in the middle of it.

    Args:
        path: the file.
        kind: the type of each line; see `paravt_jax.data.stored.parse_json`.

    Raises:
        DamagedFileError: another line is no JSON object. A killed writer cannot cause that.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    # The last piece is empty if the file ends with a line feed; otherwise it is an incomplete line.
    complete_lines = path.read_bytes().split(b"\n")[:-1]
    return [
        parse_json(line, f"{path}, line {number}", kind, _REMEDY)
        for number, line in enumerate(complete_lines, 1)
    ]


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a metrics.jsonl: one dict per step, in order.

    Each has `phase`, `step`, `wall` (Unix seconds) and the step's metrics. Values that were not
    finite are None.
    """
    return read_jsonl(path, _Line)


class MetricsWriter:
    """Appends metrics to a run directory and to TensorBoard.

    In a run of several processes, only the first one writes.

    Args:
        run_dir: Receives metrics.jsonl and, per phase, TensorBoard events in tensorboard/PHASE.
    """

    def __init__(self, run_dir: str | os.PathLike[str]):
        self._dir = pathlib.Path(run_dir)
        self.path = self._dir / "metrics.jsonl"
        # By phase; opened at the phase's first write.
        self._events: dict[str, Any] = {}
        if hosts.is_first():
            self._dir.mkdir(parents=True, exist_ok=True)

    def write(
        self, phase: str, step: int, values: Mapping[str, SupportsFloat], again: bool = False
    ) -> dict[str, Any]:
        """Record the metrics of one step. In a resumed run, call `truncate` before the first one.

        Args:
            phase: One of `PHASES`.
            step: Step number within the phase.
            values: Flat names with a slash after the group, as in "reward/accuracy". Values that
                are not finite are stored as null.
            again: Whether the step is recorded and only computed again, so that nothing is written.

        Returns:
            The line of metrics.jsonl.
        """
        assert phase in PHASES, phase
        numbers = {name: _finite(value) for name, value in values.items()}
        line = {"phase": phase, "step": int(step), "wall": round(time.time(), 3), **numbers}
        if again or not hosts.is_first():
            return line
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            # A checkpoint of this step may follow. After a power failure the checkpoint must not be
            # on disk without its metrics.
            os.fsync(file.fileno())
        finite = {name: value for name, value in numbers.items() if value is not None}
        if phase not in self._events:
            # Takes seconds where torch is installed, and only runs need it.
            import tensorboardX

            # TensorBoard hides what an earlier process has recorded of this step and later ones.
            folder = str(self._dir / "tensorboard" / phase)
            self._events[phase] = tensorboardX.SummaryWriter(folder, purge_step=step)
        for name, value in finite.items():
            self._events[phase].add_scalar(name, value, step, walltime=line["wall"])
        self._events[phase].flush()
        return line

    def truncate(self, phase: str, step: int, note: Mapping[str, Any] | None = None) -> None:
        """Remove everything after `step` of `phase`, later phases included, before a run resumes.

        An incomplete last line leaves as well: the next one would be appended to it.

        Args:
            phase: The phase that resumes.
            step: The last step to keep.
            note: Further fields of its line.
        """
        if hosts.is_first() and self.path.exists():
            kept = [line for line in read_metrics(self.path) if is_up_to(line, phase, step)]
            if note is not None:
                kept[-1].update(note)
            write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def close(self) -> None:
        """Close the event files; metrics.jsonl needs no closing."""
        for events in self._events.values():
            events.close()


def is_up_to(record: Mapping[str, Any], phase: str, step: int) -> bool:
    """Return whether a record belongs to a step of `phase` up to `step`, or to an earlier phase."""
    return (PHASES.index(record["phase"]), record["step"]) <= (PHASES.index(phase), step)


def _finite(value: SupportsFloat) -> float | None:
    """Return `value` as a float, None if it is not finite: JSON has no NaN or infinity."""
    number = float(value)
    return number if math.isfinite(number) else None


def memory() -> dict[str, float]:
    """Return the memory of the fullest device of all hosts, in GiB; CPUs have no counts.

    All processes call this.
    """
    everyone = hosts.gather(used_memory(jax.local_devices()))
    used = [device for devices in everyone for device in devices]
    if not used:
        return {}
    return {
        "memory/in_use": max(in_use for in_use, _ in used) / 2**30,
        "memory/peak": max(peak for _, peak in used) / 2**30,
    }


class StepLines:
    """The printed lines of one phase in one process.

    Args:
        steps: Number of its steps.
    """

    def __init__(self, steps: int):
        self._steps = steps
        # The first step of a process compiles, so only those after it tell how long a step takes,
        # with saves and evaluations between.
        self._first: dict[str, Any] | None = None
        self._printed = 0.0

    def add(self, line: dict[str, Any]) -> None:
        """Print the step with this line of metrics.jsonl, unless the last one is too new."""
        first = self._first = self._first or line
        left, done = self._steps - line["step"], line["step"] - first["step"]
        if left and line["wall"] - self._printed < EVERY:
            return
        self._printed = line["wall"]
        # The loss of RL is near 0 by construction: its reward says more.
        hidden = "loss" if "reward/total" in line else ""
        texts = [f"{PHASE_TITLES[line['phase']]} {line['step']}/{self._steps}"]
        texts += [
            text.format(line[name])
            for name, text in _SHOWN.items()
            if name != hidden and line.get(name) is not None
        ]
        seconds = step_seconds(line)
        texts.append(f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds:.3f} s")
        if left and done:
            seconds_left = left * (line["wall"] - first["wall"]) / done
            texts.append(f"{tqdm.format_interval(seconds_left)} left")
        say(" · ".join(texts))


def step_seconds(line: dict[str, Any]) -> float:
    """Return the measured duration of a step."""
    return sum(value or 0.0 for name, value in line.items() if name.startswith("time/"))


def say(line: str) -> None:
    """Print a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)
