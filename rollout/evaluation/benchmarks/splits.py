"""The benchmarks that can be played, and how the files of one become questions.

To add one, write a file with its entry (`Benchmark`) beside these and name it in `BENCHMARKS`.
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
"""By name; those of the paper's table first, in its order."""


def title_of(name: str) -> str:
    """What a benchmark is called in reports and tables; own questions go by their name."""
    return BENCHMARKS[name].title if name in BENCHMARKS else name


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What a split's files hold: questions, and the rows that are none, by id, with the reason."""

    items: tuple[Item, ...]
    broken: Mapping[str, str]


def load(name: str, source: str = "") -> Loaded:
    """A split from `source` (a file, a folder, a hub id; where it is published, if empty).

    FileNotFoundError where there are no files, ValueError for damaged ones and where not one row can be asked.
    """
    benchmark = BENCHMARKS[name]
    source = source or benchmark.source
    items: list[Item] = []
    seen: collections.Counter[str] = collections.Counter()
    broken: dict[str, str] = {}
    rows = benchmark.rows(read_rows(source, benchmark.patterns, benchmark.fields))
    for number, row in enumerate(rows):
        try:
            item = benchmark.read(row)
        except BrokenRow as reason:
            broken[f"row {number}"] = str(reason)
            continue
        seen[item.question.id] += 1
        if (count := seen[item.question.id]) > 1:
            item = dataclasses.replace(
                item, question=dataclasses.replace(item.question, id=f"{item.question.id}#{count}")
            )
        items.append(item)
    if not items:
        first = next(iter(broken.values()), "there are none")
        raise ValueError(
            f"--data {source}: none of {len(rows)} rows is a question of {name} ({first}); check that it is {benchmark.source}"
        )
    return Loaded(tuple(items), broken)
