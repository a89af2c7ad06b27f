"""One benchmark: where it is published, and how a row of its files becomes a question."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from rollout.evaluation.benchmarks.items import Item
from rollout.evaluation.benchmarks.tables import Row
from rollout.evaluation.statistics import Score


def _as_they_are(rows: list[Row]) -> list[Row]:
    return rows


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A split. Only the first five fields and `read` are needed."""

    name: str
    """On the command line and in files."""
    title: str
    """In reports and tables."""
    source: str
    """Hub id of the data set."""
    patterns: tuple[str, ...]
    """Its files, in their order of preference; `*` goes over folders."""
    fields: tuple[str, ...]
    """The columns that are read."""
    read: Callable[[Row], Item]
    """A row as a question. Raises BrokenRow for one that cannot be asked or scored."""
    rows: Callable[[list[Row]], list[Row]] = _as_they_are
    """The rows of a file as one row per question."""
    score: Score = "accuracy"
    """What the mean score is called."""
    paper: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Published numbers in per cent, by model."""
