"""What a run has finished: the manifest of files that must exist when it goes on.

    history.json
    {"checksum": 1189641421,
     "steps": {"sft": {"first": 1, "last": 100}, "rl": {"first": 1, "last": 40}},
     "files": {"evaluation/before-4.json": {"phase": "sft", "step": 100, "crc32": 29}, ...},
     "metrics": {"bytes": 81920, "crc32": 2769471837}}

An entry is written after the thing itself, so whatever the manifest names existed. `steps` are
those of a phase that a checkpoint holds, and whose metrics are recorded. The cold start of another
run is not part of it. `files` are evaluations and episodes, named with the weights they were made
from. `metrics` is the part of metrics.jsonl that checkpoints cover. If something is gone or has
changed, the run ends with an error that names it, instead of computing results from the rest. What
the same command makes again, such as `model`, may be missing. The first line is the checksum of the
manifest itself.
"""

from __future__ import annotations

import json
import pathlib
import zlib
from collections.abc import Callable
from typing import NotRequired

from typing_extensions import TypedDict

from paravt_jax.data.stored_json import (
    DamagedFileError,
    has_checksum,
    read_checked_json,
    write_checked_json,
)
from paravt_jax.processes import hosts
from train.durable.metrics import PHASES, read_metrics
from train.durable.run_directory import RunDirectoryError
from train.durable.step_lines import say

HISTORY = "history.json"

_REMEDY = "restore it from a backup, or start anew with another --run-dir"
_REMEDY_HERE = "restore it from a backup, or delete it, and files that are lost go unnoticed"
_ACCEPT = f"to accept the loss, delete {HISTORY}"
_OTHER_SUM = f"its checksum is not the one in {HISTORY}, which is deleted if it is the damaged one"
# What is exported from the last weights; it is never deleted to be made again.
_EXPORTS = ("model", "adapter")


class _Steps(TypedDict):
    first: int
    last: int


class _Made(TypedDict):
    phase: str
    step: int
    crc32: NotRequired[int]


class _Metrics(TypedDict):
    """The first bytes of metrics.jsonl, and their checksum."""

    bytes: int
    crc32: int


class _Content(TypedDict):
    steps: dict[str, _Steps]
    files: dict[str, _Made]
    metrics: NotRequired[_Metrics]


class History:
    """The manifest of one run. The first process reads and writes it; elsewhere it does nothing.

    Args:
        folder: the run's directory.
        push: makes what was written durable; called after each change of the manifest.

    Raises:
        RunDirectoryError: files are lost.
        DamagedFileError: the manifest or metrics.jsonl is damaged.
    """

    def __init__(self, folder: pathlib.Path, push: Callable[[], None] = lambda: None):
        self._folder = folder
        self._push = push
        self._file = folder / HISTORY
        self._content: _Content = {"steps": {}, "files": {}}
        if not hosts.is_first():
            return
        if self._file.exists():
            self._content = self._read()
            self._require_files()
            self._require_metrics()
        elif (folder / "metrics.jsonl").exists():
            say(
                f"{self._file}: not there, because an earlier version began this run or it was "
                "deleted; files that are lost already go unnoticed"
            )

    def begin(self) -> None:
        """Write the manifest of a new run. Call it before the first step is recorded."""
        if hosts.is_first() and not self._file.exists():
            self._write()

    def saved(self, phase: str, first: int, last: int) -> None:
        """Note that a complete checkpoint holds step `last`.

        Args:
            phase: "align", "sft", "control" or "rl".
            first: the first step of this process.
            last: the step of the checkpoint.
        """
        if hosts.is_first():
            steps = self._content["steps"]
            first = steps[phase]["first"] if phase in steps else first
            steps[phase] = {"first": first, "last": last}
            self._note_metrics(phase, last)
            self._write()

    def made(self, file: pathlib.Path, phase: str, step: int) -> None:
        """Note that a file is complete.

        Args:
            file: lies in the run's directory.
            phase: the phase of the weights that it was made from.
            step: their step; 0 for the weights before the phase.
        """
        name = file.relative_to(self._folder).as_posix()
        if hosts.is_first():
            crc = zlib.crc32(file.read_bytes())
            self._content["files"][name] = {"phase": phase, "step": step, "crc32": crc}
            self._write()

    def go_on(self, phase: str, step: int) -> None:
        """Forget, and delete, what was made after a step, because training goes on from it.

        Args:
            phase: a phase that has steps left.
            step: the step of its newest sound checkpoint; 0 if it has none.

        Raises:
            RunDirectoryError: later phases or an export were made from steps that would be trained
                again, or no checkpoint is left.
        """
        if not hosts.is_first():
            return
        steps = self._content["steps"]
        last = steps[phase]["last"] if phase in steps else 0
        folder = self._folder / "checkpoints" / phase
        later = [name for name in PHASES[PHASES.index(phase) + 1 :] if name in steps]
        if later:
            raise RunDirectoryError(
                f"{folder / str(last) if last else folder}: lost or damaged, but {later[-1]} was "
                f"trained from its weights: {_REMEDY}."
            )
        if step < last and step == 0:
            raise RunDirectoryError(f"{folder}: checkpoint {last} is lost: {_REMEDY}.")
        if step < last:
            self._require_no_exports(phase, step, last)
            say(
                f"warning: {folder / str(last)}: lost or damaged; {phase} goes on from step {step},"
                " and what later steps had made is made again"
            )
            steps[phase]["last"] = step
            if step < steps[phase]["first"]:
                del steps[phase]
            self._note_metrics(phase, step)
            # It marks a finished run.
            (self._folder / "result.json").unlink(missing_ok=True)
        undone = [
            name for name, made in self._content["files"].items() if _after(made, phase, step)
        ]
        for name in undone:
            del self._content["files"][name]
        # First the manifest: a kill in between must not look like a loss.
        self._write()
        for name in undone:
            (self._folder / name).unlink(missing_ok=True)

    def _require_no_exports(self, phase: str, step: int, last: int) -> None:
        exports = [self._folder / name for name in _EXPORTS if (self._folder / name).exists()]
        if exports:
            raise RunDirectoryError(
                f"{self._folder / 'checkpoints' / phase / str(last)}: lost or damaged, and "
                f"{' and '.join(map(str, exports))} was exported from it: restore it from a "
                f"backup, or move the export elsewhere to train the steps after {step} again."
            )

    def _read(self) -> _Content:
        if not has_checksum(self._file.read_bytes()):
            say(f"{self._file}: not verified: it has no checksum, as in earlier versions")
        content = read_checked_json(self._file, _Content, _REMEDY_HERE)
        phases = {*content["steps"], *(made["phase"] for made in content["files"].values())}
        unknown = sorted(phases - {*PHASES})
        if unknown:
            raise DamagedFileError(
                f"{self._file}: damaged: phase {unknown[0]!r} is unknown; {_REMEDY_HERE}"
            )
        return content

    def _require_files(self) -> None:
        for name, made in self._content["files"].items():
            file = self._folder / name
            if not file.exists():
                raise RunDirectoryError(f"{file}: lost: {_REMEDY}; {_ACCEPT}.")
            # Files of an earlier version have no checksum.
            if "crc32" in made and zlib.crc32(file.read_bytes()) != made["crc32"]:
                raise RunDirectoryError(f"{file}: damaged: {_OTHER_SUM}: {_REMEDY}.")

    def _require_metrics(self) -> None:
        file = self._folder / "metrics.jsonl"
        rows = read_metrics(file)
        for phase, steps in self._content["steps"].items():
            found = {row["step"] for row in rows if row["phase"] == phase}
            lost = [n for n in range(steps["first"], steps["last"] + 1) if n not in found]
            if lost:
                raise RunDirectoryError(
                    f"{file}: lacks step {lost[0]} of {phase}, and {len(lost) - 1} others: "
                    f"{_REMEDY}."
                )

        noted = self._content.get("metrics")
        if noted is not None and zlib.crc32(_start(file, noted["bytes"])) != noted["crc32"]:
            raise RunDirectoryError(
                f"{file}: damaged in its first {noted['bytes']} bytes: {_OTHER_SUM}: {_REMEDY}."
            )

    def _note_metrics(self, phase: str, last: int) -> None:
        """Note the lines of metrics.jsonl before the first one that a resumed run may remove."""
        file = self._folder / "metrics.jsonl"
        kept = 0
        with file.open("rb") as stream:
            for line in stream:
                row = json.loads(line)
                if row["phase"] == phase and row["step"] > last:
                    break
                kept += len(line)
        self._content["metrics"] = {"bytes": kept, "crc32": zlib.crc32(_start(file, kept))}

    def _write(self) -> None:
        write_checked_json(self._file, self._content, indent=1)
        self._push()


def _start(file: pathlib.Path, size: int) -> bytes:
    """The first bytes of a file."""
    with file.open("rb") as stream:
        return stream.read(size)


def _after(made: _Made, phase: str, step: int) -> bool:
    """Whether something was made from weights after a step."""
    mine, other = PHASES.index(made["phase"]), PHASES.index(phase)
    return mine > other or (mine == other and made["step"] > step)
