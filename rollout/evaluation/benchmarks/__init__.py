"""The paper's seven splits: questions in, from their published files."""

from rollout.evaluation.benchmarks.items import BrokenRow, Item, shuffled
from rollout.evaluation.benchmarks.splits import BENCHMARKS, Benchmark, Loaded, load
from rollout.evaluation.benchmarks.videos import VideoFolder

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "BrokenRow",
    "Item",
    "Loaded",
    "VideoFolder",
    "load",
    "shuffled",
]
