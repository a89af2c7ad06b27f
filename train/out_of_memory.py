"""Says which settings to lower when a run needs more memory than its devices have."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from paravt_jax.processes.exit_codes import UserError
from train.settings import Run

_MARK = "RESOURCE_EXHAUSTED"
# Fields whose size halves or doubles. A resumed run may change all of them.
_HALVED = {
    "cold start": (),
    "PARA-GRPO": ("rl.microbatch_tokens",),
    "rollouts": ("engine.cache_tokens", "engine.slots", "engine.read_tokens"),
}
_POLICIES = {"cold start": "sft.remat", "PARA-GRPO": "rl.remat"}
# Fields that define a run: with other values it is another run.
_DEFINING = (
    "sft.row_tokens",
    "sft.rows",
    "rl.frame_budgets",
    "rl.prompts",
    "rl.grpo.group_size",
    "evaluation.frames",
    "frames.max_pixels",
    "frames.batch",
)


class OutOfMemoryError(UserError):
    """A device has no memory left; the message names the settings to lower."""


@contextlib.contextmanager
def naming_remedies(run: Run) -> Iterator[None]:
    """Raise OutOfMemoryError if a program inside the block runs out of memory.

    Args:
        run: The settings, with all sizes chosen.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if _MARK not in str(error):
            raise
        raise OutOfMemoryError("\n".join(_lines(run, error))) from error


def _lines(run: Run, error: Exception) -> Iterator[str]:
    first = str(error).strip().splitlines()[0][:200]
    yield f"a device has no memory left ({first})"
    yield "Start the same command with lower sizes, and the run continues with the same results:"
    for part, remedies in _remedies(run):
        yield f"  {part}: {', '.join(remedies)}"
    names = _DEFINING if run.train_vision == "none" else (*_DEFINING, "train_vision")
    defining = [f"{_flag(name)} (now {_words(value)})" for name, value in _values(run, names)]
    yield f"If that is not enough, in a new --run-dir: {', '.join(defining)}"


def _remedies(run: Run) -> Iterator[tuple[str, list[str]]]:
    """Return each part of the run, with its flags and their next values."""
    for part, names in _HALVED.items():
        if part == "rollouts" and not run.plays_episodes:
            continue
        found = [
            f"{_flag(name)} {value // 2} (now {value})"
            for name, value in _values(run, names)
            if isinstance(value, int) and value > 1
        ]
        if part == "cold start" and run.sft is not None and run.sft.microbatches < run.sft.rows:
            parts = min(2 * run.sft.microbatches, run.sft.rows)
            found.insert(0, f"--sft.microbatches {parts} (now {run.sft.microbatches})")
        found += [
            f"{_flag(name)} full (now {value})"
            for name, value in _values(run, (_POLICIES.get(part, ""),))
            if value not in ("full", "offload")
        ]
        if found:
            yield part, found


def _values(run: Run, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Return the values of those fields whose section the run has."""
    for name in filter(None, names):
        settings: Any = run
        for field in name.split("."):
            settings = getattr(settings, field) if dataclasses.is_dataclass(settings) else None
        if settings is not None:
            yield name, settings


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
