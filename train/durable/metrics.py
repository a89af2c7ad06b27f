"""Where a run's figures go: metrics.jsonl first, TensorBoard beside it, Weights & Biases when asked.

Owns the history of one run directory; refuses phases it does not know and values that are not numbers. Invariant: metrics.jsonl
holds one continuous history - phases in order, each step once - however often the run was killed and resumed, because a
resumed run truncates it to the step of its checkpoint before it writes again. In a run of several processes, one writes.
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
from typing import Any

import tensorboardX

from paravt_jax.data.atomic import write_atomically

PHASES = ("align", "sft", "rl")


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, [] where there is no file. A torn last line (the writer was killed) is left out.

    Raises ValueError for a broken line elsewhere: no crash of the writer leaves one.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(
        lines[:-1], 1
    ):  # what follows the last line feed is nothing, or torn
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: not JSON ({error}); remove that line to go on"
            ) from error
    return rows


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl in order: `phase`, `step`, `wall` (Unix seconds) and the values, None where one was not finite."""
    return read_jsonl(path)


class MetricsWriter:
    """Appends figures to `run_dir`: metrics.jsonl, TensorBoard events in tensorboard/PHASE, and W&B on request.

    `config` is handed to W&B, which shows it beside the curves. Raises ModuleNotFoundError where `wandb` is asked for and not installed.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        tensorboard: bool = True,
        wandb: bool = False,
        wandb_project: str = "paravt-jax",
        config: Mapping[str, Any] | None = None,
    ):
        self._dir = pathlib.Path(run_dir)
        self._dir.mkdir(parents=True, exist_ok=True)
        self.path = self._dir / "metrics.jsonl"
        self._tensorboard = tensorboard
        self._events: dict[
            str, tensorboardX.SummaryWriter
        ] = {}  # by phase, opened at its first figure
        self._wandb = _open_wandb(self._dir, wandb_project, config or {}) if wandb else None
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            self._rewrite(
                read_jsonl(self.path)
            )  # appending to a torn line would spoil the next one too

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Records `values` of one step. Keys are flat, with a slash between group and name ("reward/accuracy"); not finite becomes null."""
        _phase_index(phase)
        numbers = {key: _number(key, value) for key, value in values.items()}
        line = {"phase": phase, "step": int(step), "wall": round(time.time(), 3)}
        if clash := numbers.keys() & line.keys():
            raise ValueError(
                f"metrics: {sorted(clash)} is a name of the line itself; give the value another name"
            )
        events = self._events_of(phase) if self._tensorboard else None
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | numbers) + "\n")
            file.flush()
            os.fsync(
                file.fileno()
            )  # a checkpoint may follow: power that fails must not leave it ahead of its figures
        if events is not None:
            _add(events, line | numbers)
            events.flush()
        if self._wandb is not None:
            figures = {
                f"{phase}/{key}": value for key, value in numbers.items() if value is not None
            }
            self._wandb.log(figures | {f"{phase}/step": int(step)})

    def truncate(self, phase: str, step: int) -> None:
        """Forgets what came after `step` of `phase`, later phases included (-1 forgets all of `phase`): call it when a run resumes.

        W&B keeps what it was sent; the repeated steps appear there twice.
        """
        last = _phase_index(phase)
        kept = [
            row
            for row in read_jsonl(self.path)
            if _phase_index(row["phase"]) < last or (row["phase"] == phase and row["step"] <= step)
        ]
        if self.path.exists():
            self._rewrite(kept)
        for name in PHASES[last:]:
            if (events := self._events.pop(name, None)) is not None:
                events.close()
            shutil.rmtree(self._dir / "tensorboard" / name, ignore_errors=True)
        if self._tensorboard and any(row["phase"] == phase for row in kept):
            self._events_of(phase)

    def close(self) -> None:
        """Closes the event files and the W&B run; metrics.jsonl needs no closing."""
        for events in self._events.values():
            events.close()
        self._events.clear()
        if self._wandb is not None:
            self._wandb.finish()

    def _events_of(self, phase: str) -> tensorboardX.SummaryWriter:
        """The phase's event files, begun again from metrics.jsonl by each process: events of a killed one may be lost or too many."""
        if phase not in self._events:
            folder = self._dir / "tensorboard" / phase
            shutil.rmtree(folder, ignore_errors=True)
            self._events[phase] = tensorboardX.SummaryWriter(str(folder))
            for row in read_jsonl(self.path):
                if row["phase"] == phase:
                    _add(self._events[phase], row)
            self._events[phase].flush()
        return self._events[phase]

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in rows))


class SilentMetrics(MetricsWriter):
    """What the other processes of a run write: nothing."""

    def __init__(self, run_dir: str | os.PathLike[str]):
        self.path = pathlib.Path(run_dir) / "metrics.jsonl"

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        pass

    def truncate(self, phase: str, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def _phase_index(phase: str) -> int:
    if phase not in PHASES:
        raise ValueError(f"metrics: phase {phase!r}; a phase is one of {', '.join(PHASES)}")
    return PHASES.index(phase)


def _number(key: str, value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"metrics: {key} is {value!r}; one number per name is needed (reduce arrays first)"
        ) from error
    return number if math.isfinite(number) else None


def _add(events: tensorboardX.SummaryWriter, row: Mapping[str, Any]) -> None:
    for key, value in row.items():
        if key not in ("phase", "step", "wall") and value is not None:
            events.add_scalar(key, value, row["step"], walltime=row["wall"])


def _open_wandb(run_dir: pathlib.Path, project: str, config: Mapping[str, Any]) -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports]  (an extra)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "wandb: asked for and not installed; `pip install 'paravt-jax[wandb]'`, or leave W&B off"
        ) from error
    identity = run_dir / "wandb-id"  # kept, so that a resumed run goes on in the same W&B run
    if not identity.exists():
        identity.write_text(uuid.uuid4().hex[:12])
    run = wandb.init(
        project=project,
        name=run_dir.name,
        dir=str(run_dir),
        config=dict(config),
        id=identity.read_text(),
        resume="allow",
    )
    for phase in PHASES:
        run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
    return run


def format_seconds(seconds: float) -> str:
    """A duration for people: "42 s", "12 min 05 s", "3 h 07 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )
