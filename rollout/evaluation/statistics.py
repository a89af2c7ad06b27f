"""Statistics of scores: the interval of a mean, and a test of two runs on the same questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

Score = Literal["accuracy", "miou"]
"""What a split's mean score is called; `miou` has recalls beside it."""

_Z = 1.959964  # of 95 %


def interval(scores: Sequence[float], clusters: Sequence[str]) -> tuple[float, float]:
    """A 95 % interval of the mean of scores in [0, 1], questions on one video (`clusters`) counting as one draw.

    Wilson's interval at the effective number of questions: p (1 - p) over the cluster-robust variance of the mean, at least the number of
    clusters where all scores are equal, so that it never has length 0.
    """
    values, n = np.asarray(scores, np.float64), len(scores)
    mean = float(values.mean())
    sums: dict[str, float] = {}
    for value, cluster in zip(values.tolist(), clusters, strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + value - mean
    count = len(sums)
    variance = (
        sum(s * s for s in sums.values()) / n**2 * (count / (count - 1) if count > 1 else 1.0)
    )
    spread = mean * (1 - mean)
    effective = spread / variance if variance > 1e-12 and spread > 1e-12 else float(count)
    middle = (mean + _Z**2 / (2 * effective)) / (1 + _Z**2 / effective)
    half = (
        _Z / (1 + _Z**2 / effective) * math.sqrt(spread / effective + (_Z / (2 * effective)) ** 2)
    )
    return max(0.0, min(mean, middle - half)), min(1.0, max(mean, middle + half))


def mcnemar(only_first: int, only_second: int) -> float:
    """The two-sided p-value of McNemar's exact test: of the questions that one of two runs alone got right, how many which."""
    n, k = only_first + only_second, min(only_first, only_second)
    if not n:
        return 1.0
    log_half = n * math.log(0.5)
    tail = sum(
        math.exp(math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) + log_half)
        for i in range(k + 1)
    )
    return min(1.0, 2 * tail)
