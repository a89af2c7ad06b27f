"""Warnings about a training run, derived from the lines of metrics.jsonl.

Each condition is a function of a phase's lines so far and returns what was seen and what to do, or
None. The warning of a condition that holds for many steps is issued once, and again only after the
condition has not held for `QUIET` steps. The same lines always give the same warnings, so they are
stored nowhere: the report finds them again in metrics.jsonl.
"""

from __future__ import annotations

import functools
import pathlib
import shutil
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from paravt_jax.data.any_path import AnyPath
from train.durable.metrics import format_seconds

Row = dict[str, Any]
Rows = Sequence[Row]

QUIET = 10
"""Steps without a condition after which it has ended."""
RECENT = 10
"""Steps whose mean is compared with earlier steps."""
CALLS_BEFORE = 0.2
"""Calls per rollout above which the model made use of its tools."""
CALLS_GONE = 0.05
"""Calls per rollout below which it no longer does."""
FORMAT_FALL = 0.1
"""Fall of f, a share of rollouts, below its highest earlier mean."""
GAP_RISE = 3.0
"""Rise of the log-prob gap, as a factor on its earlier median."""
GAP_FLOOR = 1e-5
"""Smaller gaps are rounding errors of float32."""
SILENT_STEPS = 5
"""Steps in a row in which no group has a signal."""
USUAL = 20
"""Steps whose median is the usual duration of a step."""
SLOW = 3.0
"""Duration of a slow step, as a factor on the usual one."""
SLOW_SECONDS = 10.0
"""Minimum excess of a slow step over the usual duration, in seconds."""
PAUSE = 5.0
"""Seconds between two steps that show a start, a save or an evaluation: the next one may compile
or read a cold cache, so it is not called slow."""


def calls_vanish(rows: Rows) -> str | None:
    """The model called tools, and has stopped."""
    recent = _mean(rows[-RECENT:], "calls")
    if recent is None or recent >= CALLS_GONE:
        return None
    before = _highest_mean(rows[:-RECENT], "calls")
    if before is None or before < CALLS_BEFORE:
        return None
    return (
        f"calls vanish: {recent:.2f} per rollout in the last {RECENT} steps, {before:.2f} before. "
        "Read the episodes in report.html; a higher rl.grpo.kl-coefficient or a lower "
        "rl.optimizer.learning-rate keeps the policy closer to the cold start"
    )


def compliance_falls(rows: Rows) -> str | None:
    """Fewer rollouts than before comply with the format."""
    recent = _mean(rows[-RECENT:], "compliance")
    before = _highest_mean(rows[:-RECENT], "compliance")
    if recent is None or before is None:
        return None
    if recent > before - FORMAT_FALL:
        return None
    return (
        f"compliance falls: {recent:.2f} in the last {RECENT} steps, {before:.2f} before. See "
        "which of the metrics stop/* and call/* rise; a lower rl.optimizer.learning-rate or a "
        "stronger rl.grpo.anchor-weight holds the format"
    )


def gap_rises(rows: Rows) -> str | None:
    """Sampler and trainer disagree more than before about the log-probs of sampled tokens."""
    recent = _mean(rows[-RECENT:], "logprob_gap")
    earlier = _values(rows[:-RECENT], "logprob_gap")
    if len(earlier) < RECENT or recent is None:
        return None
    before = statistics.median(earlier)
    if recent < max(GAP_RISE * before, GAP_FLOOR):
        return None
    return (
        f"the log-prob gap rises: {recent:.1e} in the last {RECENT} steps, {before:.1e} before. "
        "The update no longer scores what was sampled: see capped_fraction and token_mismatches, "
        "and resume from an earlier checkpoint if the reward falls with it"
    )


def no_signal(rows: Rows) -> str | None:
    """In no group do the rewards differ, so nothing is learned."""
    recent = _values(rows[-SILENT_STEPS:], "groups/silent")
    if len(recent) < SILENT_STEPS or min(recent) < 1.0:
        return None
    return (
        f"no group has a signal: for {SILENT_STEPS} steps all rollouts of a question earned the "
        "same. The questions are too easy or too hard (see accuracy); a higher rl.temperature or "
        "rl.grpo.group-size makes rollouts differ"
    )


def slow_step(rows: Rows) -> str | None:
    """The last step took far longer than usual."""
    if len(rows) <= RECENT:
        return None
    row = rows[-1]
    earlier = rows[-1 - USUAL : -1]
    seconds = step_seconds(row)
    usual = statistics.median(map(step_seconds, earlier))
    pause = row["wall"] - rows[-2]["wall"] - seconds
    if seconds < max(SLOW * usual, usual + SLOW_SECONDS) or pause > PAUSE:
        return None
    excess = {
        name: row[name] - statistics.median(_values(earlier, name) or [0.0])
        for name in row
        if name.startswith("time/") and row[name] is not None
    }
    part = max(excess, key=lambda name: excess[name]).removeprefix("time/")
    where = "" if part == "step" else f" (mostly {part})"
    if row.get("recompilations"):
        cause = "It compiled a program: its batch or its sequences had a new shape"
    else:
        judge = ", and at the judge if there is one" if part == "rollout" else ""
        cause = f"Look at the disk of the videos and other programs on the hosts{judge}"
    return (
        f"step {row['step']} took {format_seconds(seconds)}{where}, usually "
        f"{format_seconds(usual)}. {cause}"
    )


def disk_fills(checkpoint: int, free: int) -> str | None:
    """The next checkpoint does not fit on the disk.

    Args:
        checkpoint: Size of the last checkpoint in bytes.
        free: Free bytes on its disk.
    """
    if free >= checkpoint:
        return None
    return (
        f"the next checkpoint will not fit on the disk: the last one has {checkpoint / 2**30:.2f} "
        f"GiB, {free / 2**30:.2f} GiB are free. Make room now: a save that fails ends the run "
        "(the checkpoints before it stay)"
    )


CONDITIONS: dict[str, tuple[Callable[[Rows], str | None], ...]] = {
    "align": (slow_step,),
    "sft": (slow_step,),
    "control": (slow_step,),
    "rl": (calls_vanish, compliance_falls, gap_rises, no_signal, slow_step),
}
"""The conditions that are looked for in each phase."""


class Watch:
    """Issues each warning of a phase once.

    Args:
        phase: Name of the phase.
    """

    def __init__(self, phase: str):
        self._conditions = CONDITIONS[phase]
        self._rows: list[Row] = []
        # By condition: the number of lines after which it held last.
        self._held: dict[Callable[[Rows], str | None], int] = {}

    def add(self, row: Row) -> list[str]:
        """Take the line of the next step; returns the warnings that are new."""
        self._rows.append(row)
        count = len(self._rows)
        found = []
        for condition in self._conditions:
            message = condition(self._rows)
            if message is None:
                continue
            if condition not in self._held or count - self._held[condition] > QUIET:
                found.append(message)
            self._held[condition] = count
        return found


def warnings(rows: Rows) -> list[tuple[str, int, str]]:
    """(phase, step, warning) of a whole run, in the order in which they were issued.

    Args:
        rows: The lines of metrics.jsonl.
    """
    watches = {phase: Watch(phase) for phase in CONDITIONS}
    return [
        (row["phase"], row["step"], message)
        for row in rows
        for message in watches[row["phase"]].add(row)
    ]


def room_for_checkpoint(folder: AnyPath) -> tuple[int, int] | None:
    """Bytes of a phase's newest checkpoint, and free bytes on its disk.

    Args:
        folder: The phase's checkpoints.

    Returns:
        None if there is no checkpoint yet, while one is being written (only then is the oldest one
        removed), if the folder cannot be read, or in a bucket, which has no limit.
    """
    if not isinstance(folder, pathlib.Path):
        return None
    try:
        complete = [path for path in folder.glob("*") if path.name.isdigit()]
        if not complete or any(folder.glob("*.orbax-checkpoint-tmp*")):
            return None
        newest = max(complete, key=lambda path: int(path.name))
        return _checkpoint_bytes(newest), shutil.disk_usage(folder).free
    except OSError:
        # Orbax renames and removes files meanwhile. Training must not end because of that.
        return None


@functools.lru_cache(maxsize=8)
def _checkpoint_bytes(checkpoint: pathlib.Path) -> int:
    """Size of a checkpoint, which never changes."""
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


def step_seconds(row: Row) -> float:
    """Measured duration of a step."""
    return sum(value or 0.0 for name, value in row.items() if name.startswith("time/"))


def _values(rows: Rows, name: str) -> list[float]:
    """The known values of a metric."""
    return [row[name] for row in rows if row.get(name) is not None]


def _mean(rows: Rows, name: str) -> float | None:
    values = _values(rows, name)
    return statistics.fmean(values) if values else None


def _highest_mean(rows: Rows, name: str) -> float | None:
    """The highest mean over `RECENT` steps in a row; None for fewer steps."""
    values = _values(rows, name)
    windows = range(len(values) - RECENT + 1)
    means = [statistics.fmean(values[start : start + RECENT]) for start in windows]
    return max(means, default=None)
