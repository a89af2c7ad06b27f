"""The paper's seven splits: questions in, from their published files."""

from paravt_jax.benchmarks.items import BrokenRow, Item, shuffled
from paravt_jax.benchmarks.splits import BENCHMARKS, Benchmark, Loaded, load
from paravt_jax.benchmarks.videos import VideoFolder

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
