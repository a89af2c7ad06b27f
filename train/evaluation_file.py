"""The files of a run's folder `evaluation/`: what each evaluation played, and its rows."""

from __future__ import annotations

import pathlib
from typing import Any, NotRequired

from typing_extensions import TypedDict

from paravt_jax.data.stored import read_checked_json
from train.durable.metrics import PHASES

_REMEDY = "restore it from a backup"


class EvaluationRow(TypedDict, total=False):
    """Some fields of a line of results."""

    k: int
    dispatch: str
    temperature: float
    accuracy: float | None
    compliance: float
    calls: float
    n: int


class EvaluationFile(TypedDict):
    """A file of `evaluation/`: the lines of one K, or the episodes of one step of RL."""

    phase: str
    """Phase of the weights that it was made from, and their step."""
    step: int
    rows: list[EvaluationRow]
    episodes: list[dict[str, Any]]
    seconds: NotRequired[list[float]]
    judge: NotRequired[dict[str, int]]


def read_evaluation_file(file: pathlib.Path) -> dict[str, Any]:
    """Read a file of `evaluation/`. Raises DamagedFileError if it holds something else."""
    return read_checked_json(file, EvaluationFile, _REMEDY)


def forget_after(folder: pathlib.Path, phase: str, step: int) -> None:
    """Delete what was made from weights after a step, because training goes on from it.

    Args:
        folder: The run's folder.
        phase: The phase that goes on.
        step: The last step that is kept.
    """
    # It marks a finished run.
    (folder / "result.json").unlink(missing_ok=True)
    last = PHASES.index(phase)
    for file in (folder / "evaluation").glob("*.json"):
        made = read_evaluation_file(file)
        own = PHASES.index(made["phase"])
        if own > last or (own == last and made["step"] > step):
            file.unlink()
