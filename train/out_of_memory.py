"""Says which settings to lower when a run needs more memory than its devices have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from paravt_jax.processes.exit_codes import UserError
from train.settings import Run

# A resumed run may change these, and has the same results.
_FREE = (
    "sft.microbatches",
    "sft.remat",
    "rl.microbatch_tokens",
    "rl.remat",
    "engine.cache_tokens",
    "engine.slots",
)
# With other values it is another run.
_DEFINING = (
    "sft.row_tokens",
    "rl.frame_budgets",
    "rl.prompts",
    "evaluation.frames",
    "frames.max_pixels",
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
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = str(error).strip().splitlines()[0][:200]
        raise OutOfMemoryError(
            f"a device has no memory left ({first}); the same command continues with other values "
            f"of {_flags(run, _FREE)}: remat full, more microbatches, less of the others; else "
            f"lower, in a new --run-dir, {_flags(run, _DEFINING)}"
        ) from error


def _flags(run: Run, names: tuple[str, ...]) -> str:
    """Return the flags of those settings that the run has, with their values."""
    flags = []
    for name in names:
        section, field = name.split(".")
        settings = getattr(run, section)
        if settings is None or (section in ("engine", "evaluation") and not run.plays_episodes):
            continue
        value = getattr(settings, field)
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        flags.append(f"--{name.replace('_', '-')} (now {shown})")
    return ", ".join(flags)
