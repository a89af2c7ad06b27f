"""Accounts for the rows of published data that a run does not use, by source and reason."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.preparation import LEFT_OUT, PLAN
from paravt_jax.data.stored_json import read_json

ROWS = "rows.json"
"""File in a run's folder: per source, its rows and how many are left out for each reason."""


@dataclasses.dataclass(frozen=True)
class SourceRows:
    """The rows of one source, which is a split of the published files."""

    rows: int
    left_out: dict[str, int]
    """Rows that are not used, by reason."""

    @property
    def unused(self) -> int:
        return sum(self.left_out.values())


def count_rows(
    summary: Mapping[str, Any], further: Iterable[tuple[str, str]] = ()
) -> dict[str, SourceRows]:
    """Count the rows of each source.

    Args:
        summary: The summary of a prepared set.
        further: Source and reason of each prepared row that the run leaves out itself.
    """
    more: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for source, reason in further:
        more[source][reason] += 1
    return {
        source: SourceRows(
            counts["kept"] + sum(counts["left_out"].values()),
            counts["left_out"] | more[source],
        )
        for source, counts in summary["sources"].items()
    }


def describe_rows(sources: Mapping[str, SourceRows]) -> str:
    """A table in plain text, one line per source."""
    width = max(map(len, ["source", *sources]))
    lines = [f"{'source':{width}}  {'rows':>9}  {'used':>9}  left out"]
    for source, counts in sources.items():
        used = counts.rows - counts.unused
        reasons = f"  {_reasons(counts)}" if counts.unused else ""
        lines.append(f"{source:{width}}  {counts.rows:>9,}  {used:>9,}{reasons}")
    return "\n".join(lines)


def require_enough(
    sources: Mapping[str, SourceRows], most: float, folder: str | pathlib.Path
) -> None:
    """Check that no source has lost too many rows.

    Args:
        sources: The counts.
        most: Largest share of a source's rows that may be left out.
        folder: Folder of the prepared set.

    Raises:
        ValueError: A source has lost more. The message is one line.
    """
    lost = [
        f"{source} ({counts.unused:,} of {counts.rows:,} rows: {_reasons(counts)})"
        for source, counts in sources.items()
        if counts.unused > most * counts.rows
    ]
    if lost:
        folder = pathlib.Path(folder)
        raise ValueError(
            f"data.max_left_out: {most:g}; a larger share is left out of {'; '.join(lost)}. See "
            f"{folder / LEFT_OUT}; mend or remove these files, delete {folder / PLAN} and prepare "
            "again, or allow a larger share with --data.max-left-out"
        )


def _reasons(counts: SourceRows) -> str:
    """The most frequent reason comes first."""
    ordered = sorted(counts.left_out.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered)


def write_rows(folder: pathlib.Path, sources: Mapping[str, SourceRows]) -> None:
    """Write the counts to a run's folder, from where the report reads them."""
    content = {source: dataclasses.asdict(counts) for source, counts in sources.items()}
    write_atomically(folder / ROWS, json.dumps(content, indent=1))


def read_rows(folder: pathlib.Path) -> dict[str, Any]:
    """The counts that `write_rows` wrote, as JSON; empty for a run without published data."""
    file = folder / ROWS
    remedy = "delete it, and the report goes without these counts"
    return read_json(file, dict[str, dict[str, Any]], remedy) if file.exists() else {}
