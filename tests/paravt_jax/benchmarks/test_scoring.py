"""The text that is scored; confidence intervals and significance tests against other formulas."""

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
def test_the_final_text_is_the_answer_or_what_follows_the_thought(text, answer):
    assert final_text([Turn("<think>\nfirst\n</think>\n<answer>A</answer>"), Turn(text)]) == answer
    assert final_text([Turn(text, truncated=True)]) is None


def test_an_episode_without_turns_has_no_final_text():
    assert final_text([]) is None


def wilson(p: float, n: float) -> tuple[float, float]:
    z = 1.959964
    scale = 1 + z * z / n
    middle = (p + z * z / 2 / n) / scale
    half = z * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n) / scale
    return middle - half, middle + half


def test_one_question_per_video_gives_wilsons_interval():
    scores = [1.0] * 30 + [0.0] * 70
    videos = [str(i) for i in range(100)]
    # n - 1, because the variance is estimated.
    assert interval(scores, videos) == pytest.approx(wilson(0.3, 99), abs=1e-6)


def test_questions_about_one_video_count_as_one_draw():
    # Ten videos with ten questions each, all right or all wrong.
    scores = [1.0] * 30 + [0.0] * 70
    videos = [str(i // 10) for i in range(100)]
    assert interval(scores, videos) == pytest.approx(wilson(0.3, 9), abs=1e-6)


def test_intervals_have_a_width_and_contain_the_mean():
    for score in (0.0, 1.0, 0.5):
        low, high = interval([score] * 12, [str(i // 3) for i in range(12)])
        assert 0 <= low <= score <= high <= 1
        assert high - low > 0.1
    low, high = interval([1.0], ["a"])
    assert low < 0.3
    assert high == 1.0


def test_graded_scores_have_the_interval_of_their_mean():
    rng = np.random.default_rng(0)
    scores = rng.beta(2, 2, 2000)
    low, high = interval(scores.tolist(), [str(i) for i in range(2000)])
    assert (high - low) / 2 == pytest.approx(1.96 * scores.std(ddof=1) / math.sqrt(2000), rel=0.02)


def test_mcnemar_is_the_exact_binomial_test():
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(3, 3) == 1.0
    assert mcnemar(0, 5) == pytest.approx(2 / 32)
    assert mcnemar(1, 5) == mcnemar(5, 1) == pytest.approx(2 * 7 / 64)
    exact = 2 * sum(math.comb(400, k) for k in range(171)) / 2**400
    assert mcnemar(170, 230) == pytest.approx(exact)
