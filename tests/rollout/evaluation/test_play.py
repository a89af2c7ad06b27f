"""Episodes of an evaluation: their seeds, their order, and the figures that sum them up."""

from __future__ import annotations

import dataclasses

import pytest

from paravt_jax.method.records import (
    CallOutcome,
    CallStatus,
    CropCall,
    Episode,
    StopReason,
    Trajectory,
    Turn,
)
from paravt_jax.method.rewards import Rewards
from rollout.agent.episode import EpisodeSettings
from rollout.evaluation.figures import summarise_setting
from rollout.evaluation.play import (
    LeftOut,
    Played,
    Scoring,
    play_and_score,
    play_question,
)
from tests.rollout.evaluation.conftest import PLAN


def evaluate(sampler, environment, questions, setting, seed=0):
    """The figures, the episodes that it sums up, and the questions that were left out."""
    agents = [play_question(environment, question, setting, seed) for question in questions]
    done = play_and_score(sampler, agents, Scoring())
    outcomes = [outcome for _, outcome in done]
    played = [outcome for outcome in outcomes if isinstance(outcome, Played)]
    left_out = [outcome for outcome in outcomes if isinstance(outcome, LeftOut)]
    return summarise_setting(setting, played), played, left_out


@pytest.fixture
def oracle(scripted, small_questions, small_vocabulary):
    """oracle(wrong) calls twice, once outside the video, and then answers.

    Its answers are right, except to the questions with an id in `wrong`.
    """

    def make(wrong=()):
        def turns(request) -> str:
            prompt = small_vocabulary.decode(request.ids)
            if sampler.is_first(request):
                return PLAN
            video = request.frames[0].video
            question = next(q for q in small_questions if q.video == video and q.text in prompt)
            answer = "no idea" if question.id in wrong else question.answer
            return f"the crops show\n</think>\n<answer> {answer}</answer>"

        sampler = scripted(turns)
        return sampler

    return make


def test_figures_are_the_mean_of_their_episodes(small_questions):
    def episode(*turns: tuple[CallStatus, ...]) -> Episode:
        played = tuple(
            Turn("", tuple(CallOutcome(CropCall(0, 1), status, "") for status in statuses))
            for statuses in turns
        )
        return Episode(small_questions[0], 16, Trajectory(), played, StopReason.ANSWERED, None)

    status = CallStatus
    episodes = [
        episode((status.EXECUTED, status.CLAMPED, status.BAD_WINDOW), ()),
        episode((status.EXECUTED,), (status.TOO_MANY, status.EXECUTED), ()),
        episode(()),
        episode((status.UNREADABLE,), ()),
    ]
    earned = [
        Rewards(accuracy, 0, 0, 0, 0, compliant)
        for accuracy, compliant in ((1.0, True), (0.5, True), (0.0, False), (0.0, True))
    ]
    assert [episode.executed_calls for episode in episodes] == [2, 2, 0, 0]
    outcomes = [
        Played(episode, reward, "A") for episode, reward in zip(episodes, earned, strict=True)
    ]
    figures = summarise_setting(EpisodeSettings(16, 0.7, "sequential"), outcomes)
    low, high = figures.pop("interval")
    assert 0 <= low < 0.375 < high <= 1
    groups = figures.pop("groups")
    kind = small_questions[0].kind
    # The episodes have no overview frames, so none shows the answer.
    assert set(groups) == {kind, "hidden", f"{kind} hidden"}
    for group in groups.values():
        assert (group["n"], group["score"], group["calls"]) == (4, 0.375, 1.0)
        # Tools ran in three turns, and in one of them twice.
        assert group["parallel"] == pytest.approx(1 / 3)
    assert figures == {
        "k": 16,
        "dispatch": "sequential",
        "temperature": 0.7,
        "n": 4,
        "accuracy": 0.375,
        "compliance": 0.75,
        "calls": 1.0,
        "turns": 2.0,
        "stops": {"answered": 4},
        "without_answer": 0,
        "unread": 0,
        # A turn without text earns nothing for its format.
        "format_reward": 0.0,
        # Episodes with executed calls score 1 and 0.5, those without 0 and 0.
        "tool_gap": 0.75,
    }
    all_called = summarise_setting(EpisodeSettings(16, 0.7), outcomes[:2])
    assert all_called["tool_gap"] is None


def test_episodes_have_seeds_that_depend_on_question_and_run_only(
    oracle, small_environment, small_questions
):
    def seeds(questions, seed=3) -> list[int]:
        sampler = oracle()
        setting = EpisodeSettings(4, 0.7)
        figures, _, _ = evaluate(sampler, small_environment, questions, setting, seed)
        assert figures["n"] == len(questions)
        first_turns = [request for request, _ in sampler.main if sampler.is_first(request)]
        return [request.seed for request in first_turns]

    first = seeds(small_questions[:3])
    assert len(set(first)) == 3
    assert seeds(small_questions[:3]) == first
    assert seeds(small_questions[2:3]) == first[2:]
    assert not set(seeds(small_questions[:3], seed=4)) & set(first)


def test_unreadable_videos_are_left_out_and_an_error_if_there_are_no_others(
    oracle, small_environment, small_questions
):
    missing = dataclasses.replace(small_questions[1], video="nowhere.mp4")
    asked = [small_questions[0], missing, small_questions[2]]
    setting = EpisodeSettings(4, 0.7)
    figures, _, (left,) = evaluate(oracle(), small_environment, asked, setting)
    assert (figures["n"], figures["accuracy"]) == (2, 1.0)
    assert (left.question, left.cause) == (missing, "unreadable")
    with pytest.raises(ValueError, match="evaluation.questions"):
        evaluate(oracle(), small_environment, [missing], setting)
