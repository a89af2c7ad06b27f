"""Records the metrics of a run: metrics.jsonl, TensorBoard, and Weights & Biases on request.

metrics.jsonl is the source of all other records. It holds each step once and the phases in order,
however often a run is killed: a resumed run first removes the lines after its checkpoint. In a
multi-host run only the first process writes.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
import time
import uuid
from collections.abc import Mapping
from typing import Any, SupportsFloat

import tensorboardX
from typing_extensions import TypedDict

from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.stored_json import DamagedFileError, mismatch

PHASE_TITLES = {
    "align": "alignment",
    "sft": "cold start",
    "control": "control",
    "rl": "PARA-GRPO",
}
PHASES = tuple(PHASE_TITLES)

MEASURED = ("wall", "time/", "idle/", "speed/", "memory/", "compile/", "goodput/")
"""Prefixes of metrics that tell how the machine did, and so differ between two equal runs."""

_REMEDY = "restore the file from a backup"


class _Row(TypedDict):
    """What every line of metrics.jsonl has, beside the step's metrics."""

    phase: str
    step: int
    wall: float


def read_jsonl(path: str | os.PathLike[str], kind: Any = dict[str, Any]) -> list[dict[str, Any]]:
    """Reads a JSON-lines file; returns [] if there is none.

    An incomplete last line is skipped: the writer was killed in the middle of it.

    Args:
        path: the file.
        kind: the type of each line; see `paravt_jax.data.stored_json.mismatch`.

    Raises:
        DamagedFileError: another line is no JSON object. A killed writer cannot cause that.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    # The last piece is empty if the file ends with a line feed; otherwise it is an incomplete line.
    complete_lines = path.read_bytes().split(b"\n")[:-1]
    rows = []
    for number, line in enumerate(complete_lines, 1):
        try:
            row = json.loads(line)
        # RecursionError: nested too deeply.
        except (ValueError, RecursionError) as error:
            raise DamagedFileError(
                f"{path}, line {number}: damaged: not JSON ({error}); {_REMEDY}"
            ) from error
        wrong = mismatch(row, kind)
        if wrong:
            raise DamagedFileError(f"{path}, line {number}: damaged: {wrong}; {_REMEDY}")
        rows.append(row)
    return rows


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads a metrics.jsonl: one dict per step, in order.

    Each has `phase`, `step`, `wall` (Unix seconds) and the step's metrics. Values that were not
    finite are None.
    """
    return read_jsonl(path, _Row)


class MetricsWriter:
    """Appends metrics to a run directory and to the configured trackers.

    Args:
        run_dir: receives metrics.jsonl and, per phase, TensorBoard events in tensorboard/PHASE.
        wandb: project of Weights & Biases to send metrics to; "": none.
        config: settings shown beside the curves there.

    Raises:
        ModuleNotFoundError: `wandb` is requested but not installed.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        wandb: str = "",
        config: Mapping[str, Any] | None = None,
    ):
        self._dir = pathlib.Path(run_dir)
        self._dir.mkdir(parents=True, exist_ok=True)
        self.path = self._dir / "metrics.jsonl"
        # By phase; opened at the phase's first write.
        self._events: dict[str, tensorboardX.SummaryWriter] = {}
        self._wandb = _open_wandb(self._dir, wandb, config or {}) if wandb else None
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            # Drop an incomplete last line now. The next line would otherwise be appended to it.
            self._rewrite(read_metrics(self.path))

    def write(self, phase: str, step: int, values: Mapping[str, SupportsFloat]) -> dict[str, Any]:
        """Records the metrics of one step.

        Args:
            phase: one of `PHASES`.
            step: step number within the phase.
            values: flat names with a slash after the group, as in "reward/accuracy". Values that
                are not finite are stored as null.

        Returns:
            The line of metrics.jsonl.
        """
        _phase_index(phase)
        numbers = {key: _number(key, value) for key, value in values.items()}
        row = _row(phase, step, numbers)
        # Open the events before appending the line. Opening replays metrics.jsonl into them, so in
        # the other order this step would be recorded twice.
        events = self._events_of(phase)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            # A checkpoint of this step may follow. After a power failure the checkpoint must not be
            # on disk without its metrics.
            os.fsync(file.fileno())
        _add_scalars(events, row)
        events.flush()
        if self._wandb is not None:
            finite = {
                f"{phase}/{key}": value for key, value in numbers.items() if value is not None
            }
            self._wandb.log(finite | {f"{phase}/step": int(step)})
        return row

    def truncate(self, phase: str, step: int) -> None:
        """Removes everything after `step` of `phase`, later phases included, before a run resumes.

        W&B cannot forget; steps that run again appear there twice.

        Args:
            phase: the phase that resumes.
            step: the last step to keep; -1 removes the whole phase.
        """
        index = _phase_index(phase)

        def stays(row: dict[str, Any]) -> bool:
            earlier_phase = _phase_index(row["phase"]) < index
            return earlier_phase or (row["phase"] == phase and row["step"] <= step)

        rows = [row for row in read_metrics(self.path) if stays(row)]
        if self.path.exists():
            self._rewrite(rows)
        for name in PHASES[index:]:
            events = self._events.pop(name, None)
            if events is not None:
                events.close()
            shutil.rmtree(self._dir / "tensorboard" / name, ignore_errors=True)
        if any(row["phase"] == phase for row in rows):
            self._events_of(phase)

    def close(self) -> None:
        """Closes the event files and the W&B run; metrics.jsonl needs no closing."""
        for events in self._events.values():
            events.close()
        self._events.clear()
        if self._wandb is not None:
            self._wandb.finish()

    def _events_of(self, phase: str) -> tensorboardX.SummaryWriter:
        """The phase's TensorBoard writer, opened if needed."""
        if phase not in self._events:
            folder = self._dir / "tensorboard" / phase
            # Rebuild the events from metrics.jsonl: a killed process may have lost some or written
            # events of steps that run again.
            shutil.rmtree(folder, ignore_errors=True)
            self._events[phase] = tensorboardX.SummaryWriter(str(folder))
            for row in read_metrics(self.path):
                if row["phase"] == phase:
                    _add_scalars(self._events[phase], row)
            self._events[phase].flush()
        return self._events[phase]

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in rows))


class SilentMetrics(MetricsWriter):
    """Writes nothing: for the other processes of a multi-host run."""

    def __init__(self, run_dir: str | os.PathLike[str]):
        # Not the constructor of the base class, which would create and repair files.
        self.path = pathlib.Path(run_dir) / "metrics.jsonl"

    def write(self, phase: str, step: int, values: Mapping[str, SupportsFloat]) -> dict[str, Any]:
        return _row(phase, step, values)

    def truncate(self, phase: str, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def _phase_index(phase: str) -> int:
    if phase not in PHASES:
        raise ValueError(f"metrics: phase {phase!r}; give one of {', '.join(PHASES)}")
    return PHASES.index(phase)


def _row(phase: str, step: int, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    head = {"phase": phase, "step": int(step), "wall": round(time.time(), 3)}
    clash = numbers.keys() & head.keys()
    if clash:
        raise ValueError(
            f"metrics: {sorted(clash)} is reserved for the line itself; give the value another name"
        )
    return {**head, **numbers}


def _number(key: str, value: SupportsFloat) -> float | None:
    """`value` as a float, None if it is not finite: JSON has no NaN or infinity."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"metrics: {key} is {value!r}; give one number per name (reduce arrays first)"
        ) from error
    return number if math.isfinite(number) else None


def _add_scalars(events: tensorboardX.SummaryWriter, row: Mapping[str, Any]) -> None:
    for key, value in row.items():
        if key not in ("phase", "step", "wall") and value is not None:
            events.add_scalar(key, value, row["step"], walltime=row["wall"])


def _open_wandb(run_dir: pathlib.Path, project: str, config: Mapping[str, Any]) -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports]  (an extra)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "wandb: requested but not installed; `pip install 'paravt-jax[wandb]'`, or turn W&B off"
        ) from error
    # The id is stored, so that a resumed run continues the same W&B run.
    id_file = run_dir / "wandb-id"
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex[:12])
    run = wandb.init(
        project=project,
        name=run_dir.name,
        dir=str(run_dir),
        config=dict(config),
        id=id_file.read_text(),
        resume="allow",
    )
    # Every phase counts its own steps, so each needs its own x-axis.
    for phase in PHASES:
        run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
    return run


def format_seconds(seconds: float) -> str:
    """Formats a duration: "42 s", "12 min 05 s", "3 h 07 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
