"""Published benchmarks: their files in, questions out."""

from rollout.evaluation.benchmarks.files import VideoFolder
from rollout.evaluation.benchmarks.items import BrokenRow, Item, questions_hash
from rollout.evaluation.benchmarks.splits import BENCHMARKS, Benchmark, Loaded, load, title_of

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "BrokenRow",
    "Item",
    "Loaded",
    "VideoFolder",
    "load",
    "questions_hash",
    "title_of",
]
