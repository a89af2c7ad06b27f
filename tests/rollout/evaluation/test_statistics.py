"""Intervals agree with published formulas, and keep what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rollout.evaluation.statistics import interval, interval_of_difference

Z = 1.959963984540054


def names(count: int, per_video: int = 1) -> list[str]:
    """The video of each of `count` questions."""
    return [f"v{i // per_video}" for i in range(count)]


def wilson(p: float, n: float, z: float = Z) -> tuple[float, float]:
    scale = 1 + z * z / n
    middle = (p + z * z / 2 / n) / scale
    half = z * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n) / scale
    return middle - half, middle + half


def student(freedom: int) -> float:
    return float(stats.t.ppf(0.975, freedom))


def bonett_price(only_first: int, only_second: int, n: int) -> tuple[float, float]:
    first, second = (only_first + 1) / (n + 2), (only_second + 1) / (n + 2)
    half = Z * math.sqrt((first + second - (second - first) ** 2) / (n + 2))
    return second - first - half, second - first + half


def gains(only_first: int, only_second: int, n: int) -> list[float]:
    return [-1.0] * only_first + [1.0] * only_second + [0.0] * (n - only_first - only_second)


# --- a mean ---


def test_one_question_per_video_gives_wilsons_interval():
    scores = [1.0] * 30 + [0.0] * 70
    wanted = stats.binomtest(30, 100).proportion_ci(method="wilson")
    assert interval(scores, names(100)) == pytest.approx((wanted.low, wanted.high))


def test_questions_about_one_video_count_as_one_draw():
    # Ten videos with ten questions each, all right or all wrong. With few videos the quantile is
    # Student's.
    scores = [1.0] * 30 + [0.0] * 70
    wanted = wilson(0.3, 9, student(9))
    assert interval(scores, names(100, 10)) == pytest.approx(wanted)


def test_questions_about_a_single_video_say_as_much_as_one_question():
    low, high = interval([1.0, 0.0] * 50, ["v"] * 100)
    assert (low, high) == pytest.approx(wilson(0.5, 1))
    low, high = interval_of_difference([0.0] * 100, ["v"] * 100)
    assert high - low > 1


# --- a difference ---


@pytest.mark.parametrize(
    ("only_first", "only_second", "n"), [(0, 0, 10), (0, 1, 20), (3, 9, 60), (15, 2, 40), (0, 8, 8)]
)
def test_with_one_question_per_video_it_is_bonett_and_prices_interval(only_first, only_second, n):
    low, high = bonett_price(only_first, only_second, n)
    wanted = (max(-1.0, low), min(1.0, high))
    measured = interval_of_difference(gains(only_first, only_second, n), names(n))
    assert measured == pytest.approx(wanted)


def test_differences_in_whole_videos_count_per_video():
    # Three questions per video; in 12 of 100 videos run B is better on all of them.
    together = interval_of_difference([1.0] * 36 + [0.0] * 264, names(300, 3))
    apart = interval_of_difference([1.0] * 36 + [0.0] * 264, names(300))
    assert together[1] - together[0] > 1.6 * (apart[1] - apart[0])


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.floats(-1, 1), st.sampled_from("abcdefgh")), min_size=1, max_size=40),
)
def test_an_interval_of_a_difference_encloses_it_and_is_symmetric_under_swap(pairs):
    values, videos = [value for value, _ in pairs], [video for _, video in pairs]
    low, high = interval_of_difference(values, videos)
    assert -1 <= low <= np.mean(values) + 1e-12
    assert np.mean(values) - 1e-12 <= high <= 1
    assert high - low > 0.01
    swapped = interval_of_difference([-value for value in values], videos)
    assert swapped == pytest.approx((-high, -low))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from("abcdefgh")), min_size=1, max_size=40))
def test_an_interval_of_a_mean_encloses_it(pairs):
    values, videos = [value for value, _ in pairs], [video for _, video in pairs]
    low, high = interval(values, videos)
    assert 0 <= low <= np.mean(values) + 1e-12
    assert np.mean(values) - 1e-12 <= high <= 1
    assert high > low
