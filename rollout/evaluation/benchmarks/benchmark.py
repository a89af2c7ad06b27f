"""`Benchmark`: where a benchmark is published, and how its rows become questions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from paravt_jax.data.sources import MEDIA_PATTERNS
from rollout.evaluation.benchmarks.items import Item
from rollout.evaluation.benchmarks.tables import Row
from rollout.evaluation.statistics import Score


def _unchanged(rows: list[Row]) -> list[Row]:
    return rows


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A split of a published benchmark."""

    name: str
    """Name on the command line and in files."""
    title: str
    """Name in reports and tables."""
    source: str
    """Hub id of the data set."""
    patterns: tuple[str, ...]
    """Patterns of the data set's files, in order of preference. Only the files of the first pattern
    that matches are read. `*` also matches "/"."""
    fields: tuple[str, ...]
    """Columns to read."""
    read: Callable[[Row], Item]
    """Turns a row into a question. Raises BrokenRow if the row cannot be asked or scored."""
    rows: Callable[[list[Row]], list[Row]] = _unchanged
    """Turns the rows of the files into one row per question; by default they already are."""
    media: tuple[str, ...] = MEDIA_PATTERNS
    """Patterns of the data set's videos, subtitles and archives of them, for `paravt download`."""
    joined: tuple[str, ...] = ()
    """Patterns of archives that are slices of one archive; see `find_archives`."""
    elsewhere: str = ""
    """Where to get the videos if the data set does not hold them."""
    score: Score = "accuracy"
    """Name of the mean score."""
