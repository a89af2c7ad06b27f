"""Files are read beside sampling, with the real engine on a tiny model.

1. A slow file delays its own episode only.
2. `counted` admission gives the same bits however long files take, `arrival` the same tokens.
3. What an agent holds stays in memory, so that the engine reads no file.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from benchmarks.stall import CALLS, Setting
from paravt_jax.method.records import Episode, Trajectory


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting()


def trajectories(episodes: list[Episode]) -> list[Trajectory]:
    """Those of main agents and sub-agents."""
    written = []
    for episode in episodes:
        crops = [outcome.subagent for turn in episode.turns for outcome in turn.calls]
        written += [episode.trajectory, *(crop for crop in crops if crop is not None)]
    return written


@pytest.mark.slow
def test_four_crops_of_a_second_take_a_second_and_delay_nobody_else(setting):
    """On a quiet machine it was 1.2 s, with pauses of 50 ms at most.

    Here a pause may be longer, because the machine runs other tests. One file takes a second.
    """
    windows = pause = math.inf
    for _ in range(8):
        stall = setting.stall()
        windows = min(windows, stall.windows)
        pause = min(pause, stall.pause)
        if windows <= 2.5 and pause <= 0.25:
            break
    assert 1.0 <= windows <= 2.5
    assert pause <= 0.25


@pytest.mark.slow
def test_counted_admission_repeats_bit_for_bit_however_long_files_take(setting):
    def played(seed: int | None) -> list[Trajectory]:
        delays = random.Random(seed)
        seconds = None if seed is None else lambda task: delays.random() / 8
        features = setting.features(seconds, admission="counted")
        return trajectories(setting.play(features, setting.questions, temperature=1.0)[0])

    expected = played(None)
    assert len(expected) == len(setting.questions) * (1 + len(CALLS))
    for seed in range(2):
        for actual, wanted in zip(played(seed), expected, strict=True):
            np.testing.assert_array_equal(actual.ids, wanted.ids)
            for one, other in zip(actual.segments, wanted.segments, strict=True):
                np.testing.assert_array_equal(one.logprobs, other.logprobs)


@pytest.mark.slow
def test_admission_on_arrival_gives_the_same_tokens(setting):
    counted = setting.features(admission="counted")
    expected = trajectories(setting.play(counted, setting.questions, temperature=1.0)[0])
    delays = random.Random(0)
    features = setting.features(lambda task: delays.random() / 8)
    actual = trajectories(setting.play(features, setting.questions, temperature=1.0)[0])
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)


@pytest.mark.slow
def test_the_engine_reads_no_file_even_without_a_cache(setting):
    tasks = []
    features = setting.features(lambda task: tasks.append(task) or 0.0, cache_mib=0)
    setting.play(features, setting.questions)
    assert len(tasks) == len(set(tasks)) == len(setting.questions) * (1 + len(CALLS))
    assert len(features.cache) == 0


@pytest.mark.slow
def test_agents_that_want_the_same_frames_share_one_read(setting):
    tasks = []
    features = setting.features(lambda task: tasks.append(task) or 0.05)
    setting.play(features, setting.questions[:1] * 3, temperature=1.0)
    assert len(tasks) == 1 + len(CALLS)
