"""How the mean score changes from one folder to another, on the questions that both have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter
from statistics import fmean
from typing import Any

from rollout.evaluation.statistics import interval_of_difference
from rollout.view.index import Folder


def changes(first: Folder, second: Folder) -> Iterator[str]:
    """Yield lines of text: settings of evaluations that differ, then changes in percentage points.

    A change is the mean over one benchmark, kind of question and setting (the second folder's),
    with its 95 % interval. Questions are paired under the same setting, or else under the same K,
    or else under any, such as 64 and 16 frames.
    """
    for split, old in first.identities.items():
        new = second.identities.get(split, old)
        differ = [name for name in old if old[name] != new.get(name)]
        yield from (f"{split}: {name} {old[name]} → {new.get(name)}" for name in differ)
    both = (_evaluated(first), _evaluated(second))
    pairs = _pairs(*both, "k", "dispatch", "temperature") or _pairs(*both, "k") or _pairs(*both)
    groups = defaultdict(list)
    for old, new in pairs:
        title = (
            f"{new.split}, {new.kind}, K = {new.k}, {new.dispatch}, temperature {new.temperature}"
        )
        groups[title].append((new.accuracy - old.accuracy, old.video))
    for title, group in sorted(groups.items()):
        gains, videos = zip(*group, strict=True)
        low, high = interval_of_difference(gains, videos)
        points = f"{100 * fmean(gains):+z.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
        yield f"{title}: {points} on {len(gains)} questions"


def _evaluated(folder: Folder) -> list[Any]:
    """Return the rows of evaluations that have a score, the last ones of a run at the end."""
    names: dict[str, str] = dict.fromkeys(("before", "curve", "after"), "evaluation")
    rows = sorted(folder.rows(), key=attrgetter("step"))
    scored = [row for row in rows if row.split != "rl" and row.accuracy is not None]
    return [row._replace(split=names.get(row.split, row.split)) for row in scored]


def _pairs(olds: list[Any], news: list[Any], *setting: str) -> list[tuple[Any, Any]]:
    """Pair the last rows of a question that agree in some fields of their setting."""
    alike = attrgetter("same", "split", *setting)
    old, new = ({alike(row): row for row in rows} for rows in (olds, news))
    return [(old[key], new[key]) for key in old.keys() & new.keys()]
