"""The files of a run's folder `evaluation/`: what each evaluation played, and its rows."""

from __future__ import annotations

import pathlib
from typing import Any, NotRequired

from typing_extensions import TypedDict

from paravt_jax.data.stored_json import read_json

_REMEDY = "restore it from a backup"


class EvaluationRow(TypedDict, total=False):
    """Some fields of a row of results. Earlier versions wrote fewer, so none is required."""

    k: int
    dispatch: str
    temperature: float
    accuracy: float | None
    compliance: float
    calls: float
    n: int


class EvaluationFile(TypedDict):
    """A file of `evaluation/`: the rows of one K, or the episodes of one step of RL."""

    rows: list[EvaluationRow]
    episodes: list[dict[str, Any]]
    seconds: NotRequired[list[float]]
    judge: NotRequired[dict[str, int]]


def read_evaluation_file(file: pathlib.Path) -> dict[str, Any]:
    """Read a file of `evaluation/`. Raises DamagedFileError if it holds something else."""
    return read_json(file, EvaluationFile, _REMEDY)
