"""Accounts for examples and videos that a run does not use, and stops a run that loses too many."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Mapping

from paravt_jax.data.preparation import LEFT_OUT, SET
from paravt_jax.processes import hosts
from paravt_jax.processes.exit_codes import UserError
from train.data import Data
from train.settings import Run

_NAMED = 20  # largest number of videos to print by name


class LeftOutError(UserError):
    """More examples or videos than allowed are left out; the message names them."""


def describe(source: str, counts: collections.Counter[str]) -> str:
    """Return a line about the rows of a source.

    Args:
        source: Its name.
        counts: Its rows, by the reason why they are not used, or as `kept`.
    """
    reasons = [f"{n:,} {reason}" for reason, n in counts.most_common() if reason != "kept"]
    line = f"{source}: {counts['kept']:,} of {counts.total():,} rows are used"
    return f"{line}; left out: {', '.join(reasons)}" if reasons else line


def require_examples(
    run: Run, sources: Mapping[str, collections.Counter[str]], folder: pathlib.Path
) -> None:
    """Print the counts of each source (see `describe`), and raise an error if too much is left out.

    Args:
        run: `max_left_out` is the limit of each source.
        sources: The counts.
        folder: The folder of the prepared set.

    Raises:
        LeftOutError: A source has lost a larger share of its examples than allowed.
    """
    if hosts.is_first():
        print("\n".join(describe(source, counts) for source, counts in sources.items()))
    lost = [
        describe(source, counts)
        for source, counts in sources.items()
        if counts.total() - counts["kept"] > run.max_left_out * counts.total()
    ]
    if lost:
        raise LeftOutError(
            f"max_left_out: {run.max_left_out:g}; a larger share is left out of {'. '.join(lost)}. "
            f"See {folder / LEFT_OUT}; mend or remove these files, delete {folder / SET} and "
            "prepare again, or allow a larger share with --max-left-out"
        )


def note_unreadable(run: Run, data: Data, own: dict[str, str]) -> None:
    """Add unreadable videos to `data.unreadable`, and print the new ones.

    All processes call it: they decode different videos, so each may know of other unreadable ones.

    Args:
        run: `max_left_out` is the limit.
        data: The data, whose list of unreadable videos is extended.
        own: Reasons of videos by path that this process could not decode.

    Raises:
        LeftOutError: The list exceeds the allowed share.
    """
    known = len(data.unreadable)
    for others in hosts.gather(own):
        data.unreadable.update(others)
    count = len(data.unreadable)
    new = list(data.unreadable.items())[known:]
    named = "; ".join(f"{path}: {why}" for path, why in new[-_NAMED:])
    if count > known and hosts.is_first():
        print(f"{count} videos cannot be read and are left out; the new ones: {named}")
    if count > run.max_left_out * data.videos:
        remedy = "Replace them" if run.world is None else f"Delete {data.root} to render it again"
        raise LeftOutError(
            f"max_left_out: {run.max_left_out:g}; {count} of {data.videos} videos cannot be read; "
            f"the new ones: {named}. {remedy}, or allow a larger share with --max-left-out"
        )
