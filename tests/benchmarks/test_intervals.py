"""The simulation of intervals draws what it says, and the intervals pass it."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from benchmarks import intervals
from benchmarks.intervals import Layout, Pair, draw, simulate_difference, simulate_score

PAIR = Pair(0.6, 0.1, 0.2)


@pytest.mark.parametrize("uneven", [False, True])
def test_every_video_has_a_question_and_all_are_dealt(uneven):
    sizes = Layout("", 1549, 103, uneven).sizes(np.random.default_rng(0))
    assert sizes.sum() == 1549 and len(sizes) == 103
    assert sizes.min() >= 1
    assert (sizes.max() - sizes.min() > 1) == uneven


def test_runs_have_the_shares_of_right_answers_that_a_pair_states():
    a, b, videos = draw(Layout("", 60_000, 20_000), PAIR, 0.1, np.random.default_rng(0))
    assert len(videos) == len(a) == 60_000
    assert a.mean() == pytest.approx(0.6, abs=0.01)
    assert ((a == 1) & (b == 0)).mean() == pytest.approx(0.1, abs=0.01)
    assert ((a == 0) & (b == 1)).mean() == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize("correlation", [0.0, 0.3])
def test_answers_on_one_video_have_the_stated_correlation(correlation):
    a, _, videos = draw(Layout("", 40_000, 20_000), PAIR, correlation, np.random.default_rng(0))
    by_video = collections.defaultdict(list)
    for score, video in zip(a, videos, strict=True):
        by_video[video].append(score)
    first, second = np.array(list(by_video.values())).T
    assert np.corrcoef(first, second)[0, 1] == pytest.approx(correlation, abs=0.03)


def test_graded_scores_have_the_means_that_the_truth_is_computed_from():
    layout = Layout("", 30_000, 10_000, graded=True)
    a, b, _ = draw(layout, PAIR, 0.1, np.random.default_rng(0))
    truth = intervals.RIGHT * 0.6 + intervals.WRONG * 0.4
    assert a.mean() == pytest.approx(truth, abs=0.01)
    gain = (intervals.RIGHT - intervals.WRONG) * 0.1
    assert (b - a).mean() == pytest.approx(gain, abs=0.01)


def test_the_intervals_of_a_split_hold_what_they_promise():
    layout = Layout("", 300, 100)
    assert simulate_score(layout, 0.6, 0.3, 200).share > 0.9
    assert simulate_difference(layout, PAIR, 0.3, 200).share > 0.9


def test_an_interval_that_is_too_narrow_is_noticed_and_marked(monkeypatch):
    monkeypatch.setattr(intervals, "interval", lambda scores, videos: (0.61, 0.62))
    assert simulate_score(Layout("", 300, 100), 0.6, 0.3, 100).share < 0.5
    assert " ! |" in intervals.scores([Layout("", 60, 60)], 20)


def test_the_command_prints_both_tables(monkeypatch, capsys):
    layouts = (Layout("three", 30, 10), Layout("one", 10, 10))
    monkeypatch.setattr(intervals, "LAYOUTS", layouts)
    assert intervals.main(["--repetitions", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| three: 30 on 10") for line in lines) == 2 + 5
    alone = next(line for line in lines if line.startswith("| one: 10 on 10"))
    assert [cell.strip() for cell in alone.split("|")[4:6]] == ["", ""], "no correlation to vary"
