"""A row's numbers are those of its episodes."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from paravt_jax.method.protocol import render_call
from paravt_jax.method.records import (
    CallOutcome,
    CallStatus,
    CropCall,
    Episode,
    QuestionKind,
    StopReason,
    Trajectory,
    Turn,
)
from paravt_jax.method.rewards import Rewards
from rollout.agent.episode import EpisodeSettings
from rollout.agent.scoring import executed_calls, seed_of
from rollout.evaluation.play import (
    EvaluationSettings,
    LeftOut,
    Played,
    Scoring,
    play_and_score,
)
from rollout.evaluation.summary import row

PLAN = (
    "look closer\n</think>\n"
    + render_call(CropCall(0, 16))
    + "\n"
    + render_call(CropCall(500, 516))
)


def evaluate(sampler, environment, questions, setting, seed=0, samples=1):
    """The row, the episodes that it sums up, and the questions that are left out."""
    done = play_and_score(sampler, environment, questions, setting, Scoring(), seed, samples)
    outcomes = [outcome for _, outcome in done]
    played = [one for one in outcomes if isinstance(one, Played)]
    left_out = [one for one in outcomes if isinstance(one, LeftOut)]
    return row(setting, played), played, left_out


@pytest.fixture
def oracle(scripted, small_questions, small_vocabulary):
    """oracle(wrong) is a sampler that calls twice, once outside the video, and then answers right, except on the questions in `wrong`."""

    def make(wrong=()):
        def turns(request) -> str:
            text = small_vocabulary.decode(request.ids)
            if sampler.is_first(request):
                return PLAN
            question = next(
                q for q in small_questions if q.video == request.frames[0].video and q.text in text
            )
            answer = "no idea" if question.id in wrong else question.answer
            return f"the crops show\n</think>\n<answer> {answer}</answer>"

        sampler = scripted(turns)
        return sampler

    return make


def test_a_row_is_the_mean_of_its_episodes(small_questions):
    def episode(*turns: tuple[CallStatus, ...]) -> Episode:
        played = tuple(
            Turn("", tuple(CallOutcome(CropCall(0, 1), status, "") for status in statuses))
            for statuses in turns
        )
        return Episode(small_questions[0], 16, Trajectory(), played, StopReason.ANSWERED, None)

    done, cut, bad, many = (
        CallStatus.EXECUTED,
        CallStatus.CLAMPED,
        CallStatus.BAD_WINDOW,
        CallStatus.TOO_MANY,
    )
    episodes = [
        episode((done, cut, bad), ()),
        episode((done,), (many, done), ()),
        episode(()),
        episode((CallStatus.UNREADABLE,), ()),
    ]
    earned = [
        Rewards(acc, 0, 0, 0, 0, fine)
        for acc, fine in ((1.0, True), (0.5, True), (0.0, False), (0.0, True))
    ]
    assert [executed_calls(e) for e in episodes] == [2, 2, 0, 0]
    found = row(
        EpisodeSettings(16, 0.7, "sequential"),
        [Played(e, r, "A") for e, r in zip(episodes, earned, strict=True)],
    )
    low, high = found.pop("interval")
    assert 0 <= low < 0.375 < high <= 1
    assert found == {
        **{"k": 16, "dispatch": "sequential", "temperature": 0.7, "n": 4},
        **{"accuracy": 0.375, "format": 0.75, "calls": 1.0, "turns": 2.0},
        **{"share_with_calls": 0.5, "stops": {"answered": 4}},
        **{"refused_reports": 0, "without_answer": 0, "unread": 0},
    }


def test_the_row_of_played_questions(oracle, small_environment, small_questions):
    wrong = {small_questions[0].id}
    found, played, _ = evaluate(
        oracle(wrong), small_environment, small_questions, EpisodeSettings(4, 0.7)
    )
    count = len(small_questions)
    assert (found["n"], found["k"], found["dispatch"], found["temperature"]) == (
        count, 4, "parallel", 0.7,
    )  # fmt: skip
    assert found["accuracy"] == pytest.approx((count - 1) / count)
    assert (found["format"], found["calls"], found["turns"]) == (1.0, 1.0, 2.0)
    assert [one.episode.question for one in played] == small_questions
    assert [one.rewards.accuracy for one in played] == [
        float(q.id not in wrong) for q in small_questions
    ]
    json.dumps(found)
    assert {q.kind for q in small_questions} == {
        QuestionKind.MULTIPLE_CHOICE,
        QuestionKind.TEMPORAL_GROUNDING,
    }


@pytest.mark.parametrize(
    ("dispatch", "calls", "turns"),
    [("parallel", 1.0, 2.0), ("sequential", 1.0, 2.0), ("none", 0.0, 2.0)],
)
def test_every_dispatch_is_played_by_its_own_rules(
    oracle, small_environment, small_questions, dispatch, calls, turns
):
    found, _, _ = evaluate(
        oracle(), small_environment, small_questions[:2], EpisodeSettings(4, 0.7, dispatch)
    )
    shown = (found["dispatch"], found["accuracy"], found["calls"], found["turns"])
    assert shown == (dispatch, 1.0, calls, turns)


def test_samples_of_a_question_have_seeds_of_their_own_that_repeat(
    oracle, small_environment, small_questions
):
    def seeds(questions, seed=3) -> list[int]:
        sampler = oracle()
        found, _, _ = evaluate(
            sampler, small_environment, questions, EpisodeSettings(4, 0.7), seed, samples=2
        )
        assert found["n"] == 2 * len(questions)
        return [
            seed
            for request, _ in sampler.main
            if sampler.is_first(request)
            for seed in request.seeds
        ]

    first = seeds(small_questions[:3])
    assert len(set(first)) == 6 and seeds(small_questions[:3]) == first
    assert (
        seeds(small_questions[2:3]) == first[4:]
    )  # a question's seeds do not depend on the others
    assert not set(seeds(small_questions[:3], seed=4)) & set(first)


def test_unreadable_videos_are_left_out_and_all_of_them_is_an_error(
    oracle, small_environment, small_questions
):
    missing = dataclasses.replace(small_questions[1], video="nowhere.mp4")
    asked = [small_questions[0], missing, small_questions[2]]
    found, _, (left,) = evaluate(oracle(), small_environment, asked, EpisodeSettings(4, 0.7))
    assert found["n"] == 2 and found["accuracy"] == 1.0
    assert (left.question, left.cause) == (missing, "unreadable")
    with pytest.raises(
        ValueError, match="evaluation.questions: not one question has a readable video"
    ):
        evaluate(oracle(), small_environment, [missing], EpisodeSettings(4, 0.7))


def test_outcomes_as_they_are_done_are_those_in_order(oracle, small_environment, small_questions):
    arguments = (small_environment, small_questions, EpisodeSettings(4, 0.7), Scoring(), 3, 2)
    in_order = list(play_and_score(oracle(), *arguments))
    assert [number for number, _ in in_order] == list(range(2 * len(small_questions)))
    sampler = oracle()
    few = dict(play_and_score(sampler, *arguments, side_by_side=2))
    assert max(len(wave) for wave in sampler.waves) == 2 < len(in_order)
    for number, one in in_order:
        other = few[number]
        assert isinstance(one, Played) and isinstance(other, Played)
        assert (other.rewards, other.read) == (one.rewards, one.read)
        assert other.episode.trajectory.ids.tolist() == one.episode.trajectory.ids.tolist()


def test_seeds_tell_their_parts_apart():
    parts = [
        (0, name, n)
        for name in ("heldout/0001:red:mcq", "heldout/0001:red:tvg", "heldout/0010:red:mcq")
        for n in range(3)
    ]
    seeds = [seed_of(*p) for p in parts]
    assert seeds == [seed_of(*p) for p in parts] and len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 and isinstance(seed, int) for seed in seeds)
    assert (
        len({seed_of(0, step, n, g) for step in range(10) for n in range(8) for g in range(8)})
        == 640
    )


def test_settings_are_every_combination_once():
    settings = EvaluationSettings(
        frames=(4, 16), dispatch=("parallel", "none"), temperatures=(0.7, 0.0)
    ).episode_settings()
    assert len(settings) == len(set(settings)) == 8
    assert {s.frames for s in settings} == {4, 16} and {s.temperature for s in settings} == {
        0.7,
        0.0,
    }
    assert np.all([s.dispatch in ("parallel", "none") for s in settings])
