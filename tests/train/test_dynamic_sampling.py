"""Dynamic sampling: further questions replace groups without signal."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import numpy as np
import pytest

from paravt_jax.method.scoring import Rules
from train.data import QuestionStream
from train.learn.rl_settings import RLSettings
from train.learn.rollouts import Actor, StepRollouts, begin, draw_budgets, play_step, roll_out

PROGRAM = pathlib.Path(__file__).with_name("hosts_program.py")
STEP = 3


def settings_of(road, rounds: int) -> RLSettings:
    return dataclasses.replace(road.run.rl, prompts=3, dynamic_sampling=rounds)


def stream_of(road, settings: RLSettings) -> QuestionStream:
    budgets = functools.partial(draw_budgets, settings, 0, prompts=settings.prompts)
    return QuestionStream(road.data, None, 7, settings.grpo.group_size, budgets)


def play(road, sampler, settings, questions) -> StepRollouts:
    """Play step 3 of a run with the questions that the stream draws next."""
    return play_step(actor_of(road, sampler), questions, settings, 0, STEP)


def actor_of(road, sampler) -> Actor:
    return Actor(sampler, road.environment, Rules())


def ids_of(rollouts) -> list[str]:
    return [group.episodes[0].question.id for group in rollouts.groups]


def totals_of(rollouts) -> np.ndarray:
    return np.array([[reward.total for reward in group.rewards] for group in rollouts.groups])


def prompts_of(rollouts) -> list[int]:
    return [group.prompt for group in rollouts.groups]


def tokens_of(rollouts) -> list[list[int]]:
    return [episode.trajectory.ids.tolist() for episode in rollouts.episodes]


@pytest.fixture
def upcoming(road) -> list:
    """The first nine questions of the stream."""
    settings = settings_of(road, 0)
    questions = stream_of(road, settings)
    return [question for step in range(3) for question in questions.draw(step)]


def test_groups_without_signal_are_replaced(road, small, upcoming):
    """The first and the third question are dull, and so is one of those drawn instead."""
    dull = [upcoming[n].text for n in (0, 2, 4)]
    settings = settings_of(road, 3)
    sampler = small.Picky(road, dull)
    played = play(road, sampler, settings, stream_of(road, settings))
    batch = played.batch
    assert len({request.seeds for request in sampler.asked}) == len(sampler.asked) == 6 * 4
    assert (np.ptp(totals_of(batch), axis=1) > 0).all()
    wanted = [upcoming[n].id for n in (3, 1, 5)]
    assert ids_of(batch) == wanted and prompts_of(batch) == [0, 1, 2]
    assert played.metrics == {"groups/further": 3, "groups/replaced": 2}
    # A further question gets the frame budget of its prompt.
    budgets = [group.episodes[0].frames for group in batch.groups]
    assert budgets == draw_budgets(settings, 0, STEP, 3)
    # Metrics of the step describe the questions that were drawn first.
    assert ids_of(played.drawn) == [question.id for question in upcoming[:3]]


def test_silent_groups_remain_when_the_rounds_are_spent(road, small, upcoming):
    settings = settings_of(road, 2)
    questions = stream_of(road, settings)
    everything = [question.text for question in upcoming]
    played = play(road, small.Picky(road, everything), settings, questions)
    batch = played.batch
    assert not np.ptp(totals_of(batch), axis=1).any() and len(batch.groups) == 3
    assert played.metrics == {"groups/further": 6, "groups/replaced": 0}
    # The cursor has counted all nine questions.
    other = stream_of(road, settings)
    for step in range(3):
        other.draw(step)
    assert questions.get_state() == other.get_state()


def test_a_question_without_a_readable_video_is_replaced(road, small, upcoming, monkeypatch):
    settings = settings_of(road, 1)
    questions = stream_of(road, settings)
    draw = questions.draw

    def one_lost(step, prompts=None):
        drawn = list(draw(step, prompts))
        if prompts is None:
            drawn[1] = dataclasses.replace(drawn[1], video="lost.mp4")
        return tuple(drawn)

    monkeypatch.setattr(questions, "draw", one_lost)
    played = play(road, small.Picky(road, []), settings, questions)
    batch = played.batch
    assert prompts_of(batch) == [0, 1, 2] and batch.unreadable == 1
    assert ids_of(batch) == [upcoming[n].id for n in (0, 3, 2)]


def test_without_dynamic_sampling_nothing_else_is_drawn(road, small, upcoming):
    settings = settings_of(road, 0)
    sampler = small.Picky(road, [question.text for question in upcoming])
    played = play(road, sampler, settings, stream_of(road, settings))
    groups = begin(upcoming[:3], settings, 0, STEP)
    plain = roll_out(actor_of(road, sampler), groups, settings)
    assert tokens_of(played.batch) == tokens_of(plain)
    assert played.metrics == {}


@pytest.mark.slow
def test_two_processes_replace_the_same_groups_as_one(together, road, small, tmp_path):
    ended = together([str(PROGRAM), "resample", str(tmp_path)], 2, devices=1)
    assert [process.code for process in ended] == [0, 0], ended[0].err[-3000:]
    first, second = (json.loads(process.out.splitlines()[-1]) for process in ended)
    assert first == second == json.loads(json.dumps(small.resample(road)))
    assert first["further"] > 1 and first["replaced"] > 1
