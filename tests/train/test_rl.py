"""A step of PARA-GRPO: budgets, groups, what is counted, and log-probs that agree with the sampler's."""

from __future__ import annotations

import collections
import dataclasses

import jax
import numpy as np
import pytest

from paravt_jax.grpo import GRPOSettings
from paravt_jax.rewards import RewardSettings
from paravt_jax.structure import Kind
from rollout.requests import Sample, SampleStop
from train.batch import BatchShape, build
from train.rl import Learner, RLSettings, draw_budgets, roll_out

TAGS = {Kind.THINK_CLOSE: "</think>", Kind.CALL_OPEN: "<tool_call>", Kind.CALL_CLOSE: "</tool_call>"}  # those that are one token


@pytest.fixture(scope="module")
def learner(road):
    return Learner(road.graph, road.fresh(), road.image, road.run.rl)


@pytest.fixture
def start(learner):
    """A state that an update may take away."""
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), learner.start)


def lost(question):
    return dataclasses.replace(question, video="lost.mp4")


# --- budgets ---


def test_budgets_are_a_function_of_seed_and_step(road):
    settings = dataclasses.replace(road.run.rl, frame_budgets=(4, 8, 16, 32, 64))
    assert draw_budgets(settings, 0, 3, 8) == draw_budgets(settings, 0, 3, 8)
    assert draw_budgets(settings, 0, 3, 8) != draw_budgets(settings, 0, 4, 8) != draw_budgets(settings, 1, 4, 8)
    assert draw_budgets(settings, 0, 3, 8)[:5] == draw_budgets(settings, 0, 3, 5), "a prompt's budget does not depend on how many follow"


def test_budgets_cover_what_they_are_drawn_from_evenly(road):
    settings = dataclasses.replace(road.run.rl, frame_budgets=(4, 8, 16, 32, 64))
    drawn = collections.Counter(k for step in range(200) for k in draw_budgets(settings, 0, step, 8))
    assert set(drawn) == {4, 8, 16, 32, 64} and min(drawn.values()) > 0.8 * 320


def test_a_group_shares_its_budget_and_its_question(road, small):
    rollouts = roll_out(small.Script(road), road.scene, road.data.questions[:6], road.run.rl, seed=0, step=2)
    budgets = draw_budgets(road.run.rl, 0, 2, 6)
    assert len(set(budgets)) > 1 and len(rollouts.groups) == 6
    for group, question, budget in zip(rollouts.groups, road.data.questions[:6], budgets, strict=True):
        assert {(e.frames, e.question.id, len(e.trajectory.segments[0].frames)) for e in group} == {(budget, question.id, budget)}
    seen = {tuple(e.trajectory.ids.tolist()) for e in rollouts.groups[0]}
    assert len(seen) > 1, "the rollouts of a group have seeds of their own"


# --- steps ---


def test_what_the_engine_samples_is_what_the_update_scores(road, learner, start):
    """The real sampler: no token differs, and its log-probs are the update's within float32."""
    road.engine.load(start.weights, 0)
    state, metrics = learner.step(start, road.engine, road.scene, road.data.questions[:2], seed=0)
    assert metrics["token_mismatches"] == 0 and 0 < metrics["logprob_gap"] < 1e-5
    assert road.engine.version == int(state.step) == 1
    assert list(road.engine._weights) == [1], "the old weights were given to the update, which overwrote them"
    again = road.engine._weights[1]
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state.weights), strict=True))
    assert np.isfinite(list(metrics.values())).all()


def test_a_sampler_that_lies_is_counted(road, small, learner, start):
    class Liar(small.Script):
        def _sample(self, request, seed) -> Sample:
            return dataclasses.replace(super()._sample(request, seed), digest="of something else")

    _, metrics = learner.step(start, Liar(road), road.scene, road.data.questions[:2], seed=0)
    assert metrics["token_mismatches"] == 8


def test_a_step_is_a_function_of_its_seed_number_and_questions(road, small, learner, start):
    other = jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), start)
    (one, first), (two, second) = (
        learner.step(state, small.Script(road), road.scene, road.data.questions[:2], seed=0) for state in (start, other)
    )
    drop = lambda metrics: {name: value for name, value in metrics.items() if not name.startswith("time/")}  # noqa: E731
    assert drop(first) == drop(second)
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))


def test_groups_whose_video_cannot_be_read_are_left_out_and_counted(road, small, learner, start):
    questions, shown = [lost(road.data.questions[0]), road.data.questions[1]], []
    _, metrics = learner.step(start, small.Script(road), road.scene, questions, 0, lambda rollouts, gains: shown.append((rollouts, gains)))
    ((rollouts, gains),) = shown
    assert metrics["groups/unreadable"] == rollouts.unreadable == 1
    assert [e.question.id for group in rollouts.groups for e in group] == [road.data.questions[1].id] * 4
    assert gains.shape == (8, small.SUFFIX) and gains[:4].any() and not gains[4:].any(), "rows without a rollout earn nothing"
    assert np.isfinite(metrics["loss"]) and metrics["token_mismatches"] == 0


def test_a_step_without_any_readable_video_says_so(road, small, learner, start):
    with pytest.raises(ValueError, match="step 0 has no question with a readable video"):
        learner.step(start, small.Script(road), road.scene, [lost(q) for q in road.data.questions[:2]], 0)


def test_what_became_of_every_episode_and_every_call_is_counted(road, small, learner, start):
    class Late(small.Script):
        """Sub-agents never end in time, and neither does who was told of it."""

        def _sample(self, request, seed) -> Sample:
            sample = super()._sample(request, seed)
            text = self.vocabulary.decode(request.ids)
            late = "<think>" not in text or "<tool_response>" in text
            return dataclasses.replace(sample, stop=SampleStop.DEADLINE) if late else sample

    _, metrics = learner.step(start, Late(road), road.scene, road.data.questions[:2], seed=0)
    stops = {name: share for name, share in metrics.items() if name.startswith("stop/") and share}
    calls = {name: share for name, share in metrics.items() if name.startswith("call/") and share}
    assert set(stops) == {"stop/time_limit", "stop/answered"} and sum(stops.values()) == 1
    assert set(calls) == {"call/timed_out", "call/bad_window"} and sum(calls.values()) == 1
    assert metrics["calls/refused"] == 1 and metrics["calls"] == 0 and metrics["token_mismatches"] == 0 and np.isfinite(metrics["loss"])


def test_silent_groups_are_counted_and_move_nothing_but_the_kl(road, small, learner, start):
    class Parrot(small.Script):
        plans = ("guess\n</think><answer>E</answer>",)

    shown = []
    _, metrics = learner.step(start, Parrot(road), road.scene, road.data.questions[:2], 0, lambda _, gains: shown.append(gains))
    assert metrics["groups/silent"] == 1 and metrics["stop/answered"] == 1
    assert np.abs(shown[0]).max() < 0.2, "without a signal the small KL term is not blown up"


def test_the_structure_points_at_the_tags_of_each_row(road, small, learner):
    rollouts = roll_out(small.Script(road), road.scene, road.data.questions[:2], road.run.rl, seed=0, step=1)
    sequences = build([[e.trajectory for e in group] for group in rollouts.groups], road.scene.features, road.run.rl.shape)
    structure = learner._batch(rollouts, sequences, np.zeros(sequences.ids.shape), road.scene).structure
    decode, seen = road.data.vocabulary.decode, set()
    for row in range(8):
        for position, kind in zip(structure.positions[row], structure.kinds[row], strict=True):
            tag = TAGS.get(Kind(int(kind))) if position else None
            if tag:
                assert decode([sequences.ids[row, position]]) == tag and sequences.sampled[row, position]
                seen.add(tag)
    assert {"</think>", "<tool_call>", "</tool_call>"} <= seen


# --- settings ---

SHAPE = BatchShape(groups=2, rows=8, prompt=144, visual=16, suffix=144)
RECIPE = {"steps": 2, "shape": SHAPE, "grpo": GRPOSettings(anchor="credit"), "rewards": RewardSettings(anchor_weight=0.0)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"shape": dataclasses.replace(SHAPE, rows=4)},
            r"rl\.shape\.rows: 4; a group has rl\.grpo\.group_size = 8 rollouts, make them",
        ),
        ({"save_every": 0}, r"rl\.save_every: 0; give a whole number of at least 1"),
        ({"temperature": 0.0}, r"rl\.temperature: 0\.0; .*give a number above 0"),
        ({"frame_budgets": ()}, r"rl\.frame_budgets: \(\); name at least one"),
        ({"frame_budgets": (4, 0)}, r"rl\.frame_budgets: \(4, 0\);"),
        ({"rewards": RewardSettings()}, r"RewardSettings\.anchor_weight: 0\.5 with GRPOSettings\.anchor 'credit'.*set it to 0"),
        ({"grpo": GRPOSettings()}, r"RewardSettings\.anchor_weight: 0\.0 .*'sequence'.*set it to a positive weight"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(change, message):
    RLSettings(**RECIPE)
    with pytest.raises(ValueError, match=message):
        RLSettings(**(RECIPE | change))
