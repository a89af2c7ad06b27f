"""Readers of published benchmarks, one module each: published files in, questions out."""

from rollout.evaluation.benchmarks.benchmark import Benchmark
from rollout.evaluation.benchmarks.items import BrokenRow, Item, shuffled
from rollout.evaluation.benchmarks.splits import BENCHMARKS, Loaded, load, title_of
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
    "title_of",
]
