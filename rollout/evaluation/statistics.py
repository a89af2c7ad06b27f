"""Statistics of scores: intervals of a mean and of a difference.

Questions about one video are not independent. Both intervals therefore work with an effective
number of questions: the number of independent questions that would give the mean the same variance
as the observed questions, which come in clusters by video.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64

_UPPER = 0.975  # the upper end of a two-sided 95 % interval
_NO_SPREAD = 1e-12


def interval(scores: Sequence[float], clusters: Sequence[str]) -> tuple[float, float]:
    """Compute a 95 % interval of a mean score, with the questions of one video as one cluster.

    This is Wilson's interval for the effective number of questions. It never has length 0.

    Args:
        scores: scores in [0, 1], one per question.
        clusters: the video of each question.

    Returns:
        The lower and the upper end. Both lie in [0, 1] and enclose the mean.
    """
    values = np.asarray(scores, np.float64)
    videos = _numbered(clusters)
    mean = float(values.mean())
    spread = mean * (1 - mean)
    independent = float(values.var()) / len(values)
    if independent > _NO_SPREAD:
        effective = spread / independent / _design_effect(values, videos)
    else:
        # All scores are equal. Count every video as one question.
        effective = float(_count(videos))

    # Wilson's score interval for `effective` independent draws.
    z = _quantile(videos)
    scale = 1 + z**2 / effective
    middle = (mean + z**2 / (2 * effective)) / scale
    half = z / scale * math.sqrt(spread / effective + (z / (2 * effective)) ** 2)
    # Rounding must not put an end on the wrong side of the mean, or outside of [0, 1].
    return max(0.0, min(mean, middle - half)), min(1.0, max(mean, middle + half))


def interval_of_difference(gains: Sequence[float], clusters: Sequence[str]) -> tuple[float, float]:
    """Compute a 95 % interval of the mean difference of two runs on the same questions.

    With one question per video and scores of 0 and 1, this is the adjusted Wald interval of Bonett
    and Price (2012) for paired proportions: one imaginary question that only the first run answers
    correctly and one that only the second does join the data, so that the interval of two equal
    runs has a length. Here they join the effective number of questions.

    Args:
        gains: differences in score, in [-1, 1], one per question.
        clusters: the video of each question.

    Returns:
        The lower and the upper end. Both lie in [-1, 1] and enclose the mean.
    """
    values = np.asarray(gains, np.float64)
    videos = _numbered(clusters)
    effective = len(values) / _design_effect(values, videos)
    count = effective + 2
    mean = effective * float(values.mean()) / count
    square = (effective * float((values**2).mean()) + 2) / count
    half = _quantile(videos) * math.sqrt((square - mean**2) / count)
    return max(-1.0, mean - half), min(1.0, mean + half)


def _design_effect(values: Float64[np.ndarray, "n"], videos: Int64[np.ndarray, "n"]) -> float:
    """Return how many questions count as one, because questions on the same video are alike.

    It is the variance of the mean, robust to correlation within videos, over that of independent
    values. At least 1: questions on one video are not less alike than others, and a smaller
    estimate is chance.
    """
    count = _count(videos)
    if count == 1:  # nothing is known about other videos
        return float(len(values))
    deviations = values - values.mean()
    independent = float((deviations**2).sum())
    if count == len(values) or independent <= _NO_SPREAD:
        return 1.0
    # Deviations are summed per video before they are squared. So if all questions of a video are
    # right or wrong together, they count like one question.
    sums = np.bincount(videos, deviations)
    robust = float((sums**2).sum()) * count / (count - 1)
    return max(1.0, robust / independent)


def _quantile(videos: Int64[np.ndarray, "n"]) -> float:
    """Return the quantile of a two-sided 95 % interval.

    It is Student's for a variance that is estimated from the sums of few videos, and the normal
    distribution's if every question has a video of its own, as in Wilson's and in Bonett and
    Price's intervals.
    """
    # Imported here: it takes longer than everything else that a page of episodes imports.
    from scipy import special

    count = _count(videos)
    if count in (1, len(videos)):
        return float(special.ndtri(_UPPER))
    return float(special.stdtrit(count - 1, _UPPER))


def _numbered(clusters: Sequence[str]) -> Int64[np.ndarray, "n"]:
    """Number the clusters from 0."""
    return np.unique(np.asarray(clusters), return_inverse=True)[1].astype(np.int64)


def _count(videos: Int64[np.ndarray, "n"]) -> int:
    return int(videos.max()) + 1
