"""A row's numbers are those of its episodes."""

from __future__ import annotations

import dataclasses

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
from paravt_jax.method.rewards import Rewards, RewardSettings
from rollout.agent.episode import Setting
from rollout.evaluate import EvaluationSettings, executed_calls, play_and_score, seed_of, summarise

PLAN = (
    "look closer\n</think>\n"
    + render_call(CropCall(0, 16))
    + "\n"
    + render_call(CropCall(500, 516))
)


def evaluate(sampler, scene, questions, setting, *arguments, **more):
    """The row, and the episodes that it sums up."""
    scored = play_and_score(sampler, scene, questions, setting, *arguments, **more)
    return summarise(setting, scored), scored


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
    row = summarise(Setting(16, 0.7, "sequential"), list(zip(episodes, earned, strict=True)))
    assert [executed_calls(e) for e in episodes] == [2, 2, 0, 0]
    assert dataclasses.asdict(row) == {
        **{"k": 16, "dispatch": "sequential", "temperature": 0.7, "n": 4},
        **{"accuracy": 0.375, "format": 0.75, "calls": 1.0, "turns": 2.0},
    }


def test_the_row_of_played_questions(oracle, small_scene, small_questions):
    wrong = {small_questions[0].id}
    row, scored = evaluate(
        oracle(wrong), small_scene, small_questions, Setting(4, 0.7), RewardSettings(), seed=0
    )
    count = len(small_questions)
    assert (row.n, row.k, row.dispatch, row.temperature) == (count, 4, "parallel", 0.7)
    assert row.accuracy == pytest.approx((count - 1) / count) and (
        row.format,
        row.calls,
        row.turns,
    ) == (1.0, 1.0, 2.0)
    assert [episode.question for episode, _ in scored] == small_questions
    assert [reward.accuracy for _, reward in scored] == [
        float(q.id not in wrong) for q in small_questions
    ]
    assert {q.kind for q in small_questions} == {
        QuestionKind.MULTIPLE_CHOICE,
        QuestionKind.TEMPORAL_GROUNDING,
    }


@pytest.mark.parametrize(
    ("dispatch", "calls", "turns"),
    [("parallel", 1.0, 2.0), ("sequential", 1.0, 2.0), ("none", 0.0, 2.0)],
)
def test_every_dispatch_is_played_by_its_own_rules(
    oracle, small_scene, small_questions, dispatch, calls, turns
):
    row, _ = evaluate(
        oracle(),
        small_scene,
        small_questions[:2],
        Setting(4, 0.7, dispatch),
        RewardSettings(),
        seed=0,
    )
    assert (row.dispatch, row.accuracy, row.calls, row.turns) == (dispatch, 1.0, calls, turns)


def test_samples_of_a_question_have_seeds_of_their_own_that_repeat(
    oracle, small_scene, small_questions
):
    def seeds(questions, seed=3) -> list[int]:
        sampler = oracle()
        row, _ = evaluate(
            sampler, small_scene, questions, Setting(4, 0.7), RewardSettings(), seed, samples=2
        )
        assert row.n == 2 * len(questions)
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
    oracle, small_scene, small_questions
):
    missing = dataclasses.replace(small_questions[1], video="nowhere.mp4")
    row, scored = evaluate(
        oracle(),
        small_scene,
        [small_questions[0], missing, small_questions[2]],
        Setting(4, 0.7),
        RewardSettings(),
        seed=0,
    )
    assert row.n == 2 == len(scored) and row.accuracy == 1.0
    with pytest.raises(
        ValueError, match="evaluation.questions: not one question has a readable video"
    ):
        evaluate(oracle(), small_scene, [missing], Setting(4, 0.7), RewardSettings(), seed=0)


def test_progress_ends_at_all(oracle, small_scene, small_questions):
    told = []
    tell = lambda done, all: told.append((done, all))  # noqa: E731
    evaluate(
        oracle(),
        small_scene,
        small_questions[:3],
        Setting(4, 0.7),
        RewardSettings(),
        seed=0,
        progress=tell,
    )
    assert told == [(3, 3)]  # they plan, look and answer side by side, and so end together


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
    ).settings()
    assert len(settings) == len(set(settings)) == 8
    assert {s.frames for s in settings} == {4, 16} and {s.temperature for s in settings} == {
        0.7,
        0.0,
    }
    assert np.all([s.dispatch in ("parallel", "none") for s in settings])
