"""Statistics of scores: the interval of a mean, and a test for two runs on the same questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

Score = Literal["accuracy", "miou"]
"""Name of a split's mean score. `miou` (grounding) also has recalls at several overlaps."""

_Z = 1.959964  # the normal quantile of a two-sided 95 % interval
_NO_SPREAD = 1e-12


def interval(scores: Sequence[float], clusters: Sequence[str]) -> tuple[float, float]:
    """Compute a 95 % interval of a mean score, with the questions of one video as one cluster.

    Questions on the same video are correlated. So this is Wilson's interval for the effective
    number of questions: p (1 - p) over the cluster-robust variance of the mean. The interval never
    has length 0.

    Args:
        scores: scores in [0, 1], one per question.
        clusters: the video of each question.

    Returns:
        The lower and the upper end. Both lie in [0, 1] and enclose the mean.
    """
    mean = float(np.asarray(scores, np.float64).mean())
    spread = mean * (1 - mean)
    effective = _effective_count(scores, clusters, mean, spread)

    # Wilson's score interval for `effective` independent draws.
    scale = 1 + _Z**2 / effective
    middle = (mean + _Z**2 / (2 * effective)) / scale
    root = math.sqrt(spread / effective + (_Z / (2 * effective)) ** 2)
    half = _Z / scale * root
    # Rounding must not put an end on the wrong side of the mean, or outside of [0, 1].
    return max(0.0, min(mean, middle - half)), min(1.0, max(mean, middle + half))


def _effective_count(
    scores: Sequence[float], clusters: Sequence[str], mean: float, spread: float
) -> float:
    """The number of independent questions that would give the mean the same variance."""
    # Deviations are summed per video before they are squared. So if all questions of a video are
    # right or wrong together, they count like one question.
    deviations: dict[str, float] = {}
    for score, cluster in zip(scores, clusters, strict=True):
        deviations[cluster] = deviations.get(cluster, 0.0) + score - mean
    count = len(deviations)
    variance = sum(d * d for d in deviations.values()) / len(scores) ** 2
    if count > 1:  # the small-sample correction of a cluster-robust variance
        variance *= count / (count - 1)
    if variance > _NO_SPREAD and spread > _NO_SPREAD:
        return spread / variance
    # No spread, for example because all scores are equal. Count every video as one question.
    return float(count)


def mcnemar(only_first: int, only_second: int) -> float:
    """Compute the two-sided p-value of McNemar's exact test.

    Args:
        only_first: number of questions that the first run alone got right.
        only_second: number of questions that the second run alone got right.
    """
    n = only_first + only_second
    k = min(only_first, only_second)
    if not n:
        return 1.0
    # Twice the tail of a binomial with p = 1/2, summed in logs: n choose i overflows a float.
    log_half = n * math.log(0.5)
    tail = sum(
        math.exp(math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) + log_half)
        for i in range(k + 1)
    )
    return min(1.0, 2 * tail)
