"""The list of benchmarks, and `load`, which reads the questions of one.

To add a benchmark, write a file with its entry (`Benchmark`) beside the others and list it in
`BENCHMARKS`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from rollout.evaluation.benchmarks.benchmark import Benchmark
from rollout.evaluation.benchmarks.cgbench import CGBENCH
from rollout.evaluation.benchmarks.charades import CHARADES
from rollout.evaluation.benchmarks.items import BrokenRow, Item
from rollout.evaluation.benchmarks.longvideobench import LONGVIDEOBENCH
from rollout.evaluation.benchmarks.lvbench import LVBENCH
from rollout.evaluation.benchmarks.mlvu import MLVU
from rollout.evaluation.benchmarks.mmvu import MMVU
from rollout.evaluation.benchmarks.tables import read_rows
from rollout.evaluation.benchmarks.videomme import VIDEOMME, VIDEOMME_WITH_SUBTITLES

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        VIDEOMME,
        VIDEOMME_WITH_SUBTITLES,
        LONGVIDEOBENCH,
        LVBENCH,
        MLVU,
        MMVU,
        CHARADES,
        CGBENCH,
    )
}
"""Benchmarks by name. The paper's come first, in the order of its table."""


def title_of(name: str) -> str:
    """A benchmark's name in reports and tables; the name itself for a user's own questions."""
    return BENCHMARKS[name].title if name in BENCHMARKS else name


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The content of a split's files."""

    items: tuple[Item, ...]
    broken: Mapping[str, str]
    """Rows that cannot be asked or scored: "row NUMBER" and the reason."""


def load(name: str, source: str = "") -> Loaded:
    """Load the questions of a split.

    Args:
        name: the benchmark.
        source: a file, a folder or a hub id; by default the hub id where it is published.

    Raises:
        FileNotFoundError: the files of the split are missing.
        ValueError: a file is damaged, or no row can be asked.
    """
    benchmark = BENCHMARKS[name]
    source = source or benchmark.source
    items: list[Item] = []
    seen: collections.Counter[str] = collections.Counter()
    broken: dict[str, str] = {}
    rows = benchmark.rows(read_rows(source, benchmark.patterns, benchmark.fields))
    for number, row in enumerate(rows):
        try:
            item = dataclasses.replace(benchmark.read(row), row=row)
        except BrokenRow as reason:
            broken[f"row {number}"] = str(reason)
            continue
        id = item.question.id
        seen[id] += 1
        if seen[id] > 1:  # lines and transcripts are found by id
            question = dataclasses.replace(item.question, id=f"{id}#{seen[id]}")
            item = dataclasses.replace(item, question=question)
        items.append(item)
    if not items:
        reason = next(iter(broken.values()), "there are none")
        raise ValueError(
            f"--data {source}: none of {len(rows)} rows is a question of {name} ({reason}); "
            f"check that it is {benchmark.source}"
        )
    return Loaded(tuple(items), broken)
