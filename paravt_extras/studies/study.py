"""Carries out the runs of a study: ordinary run directories, one after the other.

A study can be interrupted and repeated: finished runs are only read.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
from collections.abc import Sequence

from train.durable.allocator import reuse_freed_memory
from train.durable.checkpoint import CheckpointError
from train.durable.interrupts import Interrupts, Stopped
from train.durable.run_directory import RunDirectory, RunDirectoryError
from train.left_out import LeftOutError
from train.run import execute, resolved
from train.settings import Run


def require_seeds(seeds: Sequence[int]) -> None:
    """Raise ValueError if these are not different seeds."""
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds: {seeds}; give different numbers of at least 0")


def over_seeds(values: Sequence[float | None], form: str, spread: str) -> str:
    """Mean ± standard deviation of what is known, in these formats; a dash for nothing."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    mean = format(statistics.mean(known), form)
    return mean if len(known) == 1 else f"{mean} ± {format(statistics.stdev(known), spread)}"


def carry_out(runs: Sequence[Run], interrupts: Interrupts) -> None:
    """Execute the runs that are not finished, in this order."""
    for number, run in enumerate(runs, 1):
        # Open the directory even if its run is finished: this raises an error if the run had other
        # settings.
        with RunDirectory(run.run_dir, resolved(run)):
            finished = (pathlib.Path(run.run_dir) / "result.json").exists()
        if not finished:
            print(f"run {number} of {len(runs)}: {run.name}, seed {run.seed}", file=sys.stderr)
            execute(run, interrupts)


def run_study(runs: Sequence[Run]) -> int:
    """Carry out the runs of a command, and print what stops it.

    Args:
        runs: The runs, in their order.

    Returns:
        The exit code: 0 if all runs are finished.
    """
    reuse_freed_memory()
    try:
        with Interrupts() as interrupts:
            carry_out(runs, interrupts)
    except Stopped as stop:
        print(f"\n{stop}; the same command continues from there", file=sys.stderr)
        return stop.code
    except (
        RunDirectoryError,
        CheckpointError,
        LeftOutError,
        ValueError,
        OSError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
