"""Accounts for examples and videos that a run does not use, and stops a run that loses too many."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterable, Mapping

from paravt_jax.data.preparation import LEFT_OUT, SET
from paravt_jax.processes import hosts
from paravt_jax.processes.exit_codes import UserError
from train.data import Data
from train.settings import Run

_NAMED = 20  # largest number of videos to print by name

Counts = dict[str, collections.Counter[str]]
"""Examples per source, by the reason why they are not used; the others are under `kept`."""


class LeftOutError(UserError):
    """More examples or videos than allowed are left out; the message names them."""


def count_examples(
    kept: Mapping[str, Mapping[str, int]], further: Iterable[tuple[str, str]] = ()
) -> Counts:
    """Count the examples of each source.

    Args:
        kept: The counts of a prepared set.
        further: Source and reason of each prepared example that the run leaves out itself.
    """
    sources = {source: collections.Counter(counts) for source, counts in kept.items()}
    for source, reason in further:
        sources[source]["kept"] -= 1
        sources[source][reason] += 1
    return sources


def describe_counts(sources: Counts) -> str:
    """Return a table in plain text, one line per source."""
    width = max(map(len, ["source", *sources]))
    lines = [f"{'source':{width}}  {'rows':>9}  {'used':>9}  left out"]
    for source, counts in sources.items():
        line = f"{source:{width}}  {counts.total():>9,}  {counts['kept']:>9,}  {_reasons(counts)}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def require_examples(run: Run, sources: Counts, folder: pathlib.Path) -> None:
    """Raise LeftOutError if a source has lost a larger share of its examples than allowed.

    `folder` holds the prepared set.
    """
    lost = [
        f"{source} ({counts.total() - counts['kept']:,} of {counts.total():,} rows: "
        f"{_reasons(counts)})"
        for source, counts in sources.items()
        if counts.total() - counts["kept"] > run.max_left_out * counts.total()
    ]
    if lost:
        raise LeftOutError(
            f"max_left_out: {run.max_left_out:g}; a larger share is left out of {'; '.join(lost)}. "
            f"See {folder / LEFT_OUT}; mend or remove these files, delete {folder / SET} and "
            "prepare again, or allow a larger share with --max-left-out"
        )


def _reasons(counts: collections.Counter[str]) -> str:
    """Return the reasons with their counts, the most frequent first."""
    return ", ".join(f"{n:,} {reason}" for reason, n in counts.most_common() if reason != "kept")


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
