"""What counts as said, and intervals and tests of significance against other ways to compute them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paravt_jax.method.records import Turn
from rollout.evaluation.play import final_text
from rollout.evaluation.statistics import interval, mcnemar


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\nhm\n</think>\n<answer> B </answer>", "B"),
        ("<think>\nhm\n</think>\nB. two", "B. two"),
        ("<think>\nhm\n</think>\n<answer>B", "B"),
        ("B", "B"),
        ("", None),
        ("<think>\nit is B", None),
        ('<think>\nx\n</think>\n<tool_call>{"name": "crop_video"}</tool_call> B', None),
        ("<think>\nx\n</think>\n<answer></answer>", None),
    ],
)
def test_what_is_said(text, answer):
    assert final_text([Turn("<think>\nfirst\n</think>\n<answer>A</answer>"), Turn(text)]) == answer
    assert final_text([Turn(text, truncated=True)]) is None


def test_no_turn_says_nothing():
    assert final_text([]) is None


def wilson(p: float, n: float) -> tuple[float, float]:
    z = 1.959964
    middle, half = (
        (p + z * z / 2 / n) / (1 + z * z / n),
        z * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n) / (1 + z * z / n),
    )
    return middle - half, middle + half


def test_one_question_a_video_is_wilsons_interval():
    scores = [1.0] * 30 + [0.0] * 70
    low, high = interval(scores, [str(i) for i in range(100)])
    assert (low, high) == pytest.approx(
        wilson(0.3, 99), abs=1e-6
    )  # n - 1: the variance is estimated


def test_questions_on_one_video_count_as_one_draw():
    scores, videos = (
        [1.0] * 30 + [0.0] * 70,
        [str(i // 10) for i in range(100)],
    )  # ten videos, all or nothing
    assert interval(scores, videos) == pytest.approx(wilson(0.3, 9), abs=1e-6)


def test_intervals_never_vanish_and_hold_the_mean():
    for score in (0.0, 1.0, 0.5):
        low, high = interval([score] * 12, [str(i // 3) for i in range(12)])
        assert low <= score <= high and high - low > 0.1 and 0 <= low and high <= 1
    low, high = interval([1.0], ["a"])
    assert low < 0.3 and high == 1.0


def test_graded_scores_have_the_interval_of_their_mean():
    rng = np.random.default_rng(0)
    scores = rng.beta(2, 2, 2000)
    low, high = interval(scores.tolist(), [str(i) for i in range(2000)])
    assert (high - low) / 2 == pytest.approx(1.96 * scores.std(ddof=1) / math.sqrt(2000), rel=0.02)


def test_mcnemar_is_the_exact_binomial_test():
    assert mcnemar(0, 0) == 1.0 and mcnemar(3, 3) == 1.0
    assert mcnemar(0, 5) == pytest.approx(2 / 32) and mcnemar(1, 5) == pytest.approx(
        2 * 7 / 64
    ) == mcnemar(5, 1)
    exact = 2 * sum(math.comb(400, k) for k in range(171)) / 2**400
    assert mcnemar(170, 230) == pytest.approx(exact)
