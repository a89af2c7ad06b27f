"""A step of PARA-GRPO: budgets, groups, metrics, and log-probs that agree with the sampler."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.compilation import compile_ahead
from models.features import FrameFeatures
from models.model import abstract_model
from models.sharding import make_mesh
from models.trained import Skeleton
from paravt_jax.data.frames import VideoError
from paravt_jax.method.accuracy import Rules
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.method.structure import Kind
from paravt_jax.processes import hosts
from rollout.engine.requests import Sample, SampleStop
from tests.compiled_names import CompiledNames
from tests.train.steps import road_learner, take_step, take_whole_step
from train.learn.packing import StepRoom, StepShape
from train.learn.rl import Learner
from train.learn.rl_batch import LaidOut, lay_out
from train.learn.rl_settings import RLSettings
from train.learn.rollouts import (
    Actor,
    begin,
    draw_budgets,
    require_fresh,
    roll_out,
    token_ages,
)
from train.learn.update import make_logprobs

# Tags that are one token.
TAGS = {
    Kind.THINK_CLOSE: "</think>",
    Kind.CALL_OPEN: "<tool_call>",
    Kind.CALL_CLOSE: "</tool_call>",
}


@pytest.fixture(scope="module")
def learner(road):
    return road_learner(road)


@pytest.fixture
def start(learner):
    """A state that an update may donate."""
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), learner.initial)


def gated(road, *budgets: int) -> RLSettings:
    return dataclasses.replace(road.run.rl, frame_budgets=budgets or (4, 8, 16, 32, 64))


def rolled_out(road, sampler, questions, step=1, *budgets):
    settings = gated(road, *(budgets or (4, 16)))
    actor = Actor(sampler, road.environment, Rules())
    return roll_out(actor, begin(questions, settings, 0, step), settings)


def laid_out(road, rollouts, shape: StepShape | None = None) -> LaidOut:
    """The arrays of rollouts, in micro-batches of one size."""
    shape = road.run.rl_shape if shape is None else shape
    sizes = shape.microbatches(shape.tokens, devices=1, pieces=1)[:1]
    room = StepRoom(shape, sizes, hosts.process_count())
    return lay_out(rollouts, road.environment, room)


def ids_of(step: LaidOut, row: int) -> np.ndarray:
    """The ids of a rollout in the packed rows, from the last token of its prompt on."""
    (found,) = [
        np.asarray(part.ids).reshape(-1)[part.index[row][part.index[row] >= 0]]
        for part in step.microbatches
        if part.index[row, 0] >= 0
    ]
    return found


def lost(question):
    return dataclasses.replace(question, video="lost.mp4")


# --- budgets ---


def test_budgets_are_a_function_of_seed_and_step(road):
    assert draw_budgets(gated(road), 0, 3, 8) == draw_budgets(gated(road), 0, 3, 8)
    assert (
        draw_budgets(gated(road), 0, 3, 8)
        != draw_budgets(gated(road), 0, 4, 8)
        != draw_budgets(gated(road), 1, 4, 8)
    )
    assert draw_budgets(gated(road), 0, 3, 8)[:5] == draw_budgets(gated(road), 0, 3, 5), (
        "a budget does not depend on the number of prompts after it"
    )


def test_a_group_shares_its_budget_and_its_question(road, small):
    budgets = draw_budgets(gated(road, 4, 16), 0, 2, 6)
    rollouts = rolled_out(road, small.Script(road), road.data.questions[:6], 2)
    assert len(set(budgets)) > 1 and len(rollouts.groups) == 6
    for group, question, budget in zip(
        rollouts.groups, road.data.questions[:6], budgets, strict=True
    ):
        shown = [len(episode.trajectory.segments[0].frames) for episode in group.episodes]
        assert shown == [budget] * len(group.episodes)
        assert {(e.frames, e.question.id) for e in group.episodes} == {(budget, question.id)}
    seen = {tuple(e.trajectory.ids.tolist()) for e in rollouts.groups[0].episodes}
    assert len(seen) > 1, "each rollout of a group has its own seed"


# --- steps ---


def test_the_reference_is_in_host_memory_in_the_type_of_activations(road, small):
    """Rounding weights to bfloat16 in advance or before each product gives equal log-probs."""
    model = abstract_model(road.model.config, dtype=jnp.bfloat16)
    skeleton, weights = Skeleton(nnx.split(model.text)[0]), road.fresh()
    learner = Learner(skeleton, weights, road.model.config, road.run.rl, road.run.rl_shape)
    for kept, trained in zip(
        jax.tree.leaves(learner.reference), jax.tree.leaves(learner.initial.weights), strict=True
    ):
        assert kept.sharding.memory_kind == "pinned_host"
        assert kept.dtype == jnp.bfloat16 != trained.dtype
        assert trained.sharding.memory_kind == "device"
    rollouts = rolled_out(road, small.Script(road), road.data.questions[:2])
    step = laid_out(road, rollouts)
    arguments = (step.visual, step.microbatches[0])
    logprobs = make_logprobs(skeleton, 0.7, make_mesh())
    on_device = jax.device_put(learner.reference, jax.tree.map(lambda x: x.sharding, weights))
    # Otherwise XLA leaves out the rounding on CPUs.
    exactly: dict[str, str | bool] = {"xla_allow_excess_precision": False}
    one, other = (
        logprobs.lower(w, *arguments).compile(compiler_options=exactly)(
            *logprobs.first, w, *arguments
        )
        for w in (on_device, weights)
    )
    np.testing.assert_array_equal(one, other)


def test_the_engine_sleeps_during_the_update(road, small, learner, start, monkeypatch):
    sampler, seen = small.Script(road), []

    def watched(name, program):
        return lambda *arguments, **options: (
            seen.append((name, sampler.awake)) or program(*arguments, **options)
        )

    updater = learner.updater
    monkeypatch.setattr(learner, "logprobs", watched("logprobs", learner.logprobs))
    monkeypatch.setattr(updater, "add", watched("add", updater.add))
    monkeypatch.setattr(updater, "apply", watched("apply", updater.apply))
    take_step(learner, start, sampler, road.environment, road.data.questions[:2])
    assert {name for name, _ in seen} == {"logprobs", "add", "apply"}
    assert not any(awake for _, awake in seen) and sampler.awake


def test_what_the_engine_samples_is_what_the_update_scores(road, learner, start):
    """With the real engine no token differs, and log-probs agree within float32."""
    road.engine.load(start.weights, 0)
    state, metrics = take_step(
        learner, start, road.engine, road.environment, road.data.questions[:2], seed=0
    )
    assert metrics["token_mismatches"] == 0 and 0 < metrics["logprob_gap"] < 1e-5
    assert road.engine.version == int(state.step) == 1
    # The second step would have a gap if the engine still had the old weights.
    _, second = take_step(
        learner, state, road.engine, road.environment, road.data.questions[:2], seed=0
    )
    assert second["token_mismatches"] == 0 and 0 < second["logprob_gap"] < 1e-5
    assert np.isfinite(list(metrics.values())).all()


def test_a_wrong_digest_is_counted(road, small, learner, start):
    class Liar(small.Script):
        def _sample(self, request) -> Sample:
            return dataclasses.replace(super()._sample(request), digest="of something else")

    _, metrics = take_step(
        learner, start, Liar(road), road.environment, road.data.questions[:2], seed=0
    )
    assert metrics["token_mismatches"] == 8


def test_groups_with_an_unreadable_video_are_left_out_and_counted(road, small, learner, start):
    questions = [lost(road.data.questions[0]), road.data.questions[1]]
    _, trained, metrics = take_whole_step(
        learner, start, small.Script(road), road.environment, questions
    )
    rollouts, gains = trained.rollouts, trained.advantages
    assert metrics["groups/unreadable"] == rollouts.unreadable == 1
    assert [e.question.id for group in rollouts.groups for e in group.episodes] == [
        road.data.questions[1].id
    ] * 4
    assert gains.shape == (8, small.SUFFIX) and gains[:4].any() and not gains[4:].any(), (
        "rows without a rollout have no advantage"
    )
    assert np.isfinite(metrics["loss"]) and metrics["token_mismatches"] == 0


def test_outcomes_of_episodes_and_calls_are_counted(road, small, learner, start):
    class Late(small.Script):
        """Sub-agents miss the deadline, and so do agents that have read of it."""

        def _sample(self, request) -> Sample:
            sample = super()._sample(request)
            text = self.vocabulary.decode(request.ids)
            late = "<think>" not in text or "<tool_response>" in text
            return dataclasses.replace(sample, stop=SampleStop.DEADLINE) if late else sample

    _, metrics = take_step(
        learner, start, Late(road), road.environment, road.data.questions[:2], seed=0
    )
    stops = {name: share for name, share in metrics.items() if name.startswith("stop/") and share}
    calls = {name: share for name, share in metrics.items() if name.startswith("call/") and share}
    assert set(stops) == {"stop/time_limit", "stop/answered"} and sum(stops.values()) == 1
    assert set(calls) == {"call/timed_out", "call/bad_window"} and sum(calls.values()) == 1
    assert metrics["calls/refused"] == 1 and metrics["calls"] == 0
    assert metrics["token_mismatches"] == 0
    assert np.isfinite(metrics["loss"])


def test_silent_groups_are_counted_and_leave_only_the_kl_term(road, small, learner, start):
    class Parrot(small.Script):
        plans = ("guess\n</think><answer>E</answer>",)

    _, trained, metrics = take_whole_step(
        learner, start, Parrot(road), road.environment, road.data.questions[:2]
    )
    assert metrics["groups/silent"] == 1 and metrics["stop/answered"] == 1
    largest = np.abs(trained.advantages).max()
    assert largest < 0.2, "the small KL term must not be scaled up"


def test_the_structure_points_at_the_tags_of_each_row(road, small):
    rollouts = rolled_out(road, small.Script(road), road.data.questions[:2])
    step = laid_out(road, rollouts)
    structure = step.grpo.structure
    decode, seen = road.data.vocabulary.decode, set()
    for row in range(8):
        for position, kind in zip(structure.positions[row], structure.kinds[row], strict=True):
            tag = TAGS.get(Kind(int(kind))) if position else None
            if tag:
                assert (
                    decode([ids_of(step, row)[position]]) == tag and step.grpo.mask[row, position]
                )
                seen.add(tag)
    assert {"</think>", "<tool_call>", "</tool_call>"} <= seen


# --- processes and what cannot be read ---


def anchored_learner(road, **changes) -> Learner:
    """A learner with the recipes' anchor, whose mean runs over the whole step."""
    settings = dataclasses.replace(
        road.run.rl, grpo=dataclasses.replace(road.run.rl.grpo, anchor="likelihood"), **changes
    )
    run = dataclasses.replace(road.run, rl=settings)
    return road_learner(road, settings, run.rl_shape)


@pytest.fixture(scope="module")
def shape(road) -> StepShape:
    return road.run.rl_shape


@pytest.mark.parametrize("players", [((0, 0, 0, 0), (1, 1, 1, 1)), ((1, 1, 0, 0), (1, 0, 0, 1))])
def test_processes_lay_out_the_same_rows_and_their_own_frames(
    road, small, shape, monkeypatch, players
):
    """Each provides one prompt, although it played rollouts of both."""
    rollouts = rolled_out(road, small.Script(road), road.data.questions[:2])
    whole = laid_out(road, rollouts, shape)
    grids = whole_grids(road, rollouts)
    pairs = zip(rollouts.groups, players, strict=True)
    played_by_both = tuple(dataclasses.replace(group, players=own) for group, own in pairs)
    played = dataclasses.replace(rollouts, groups=played_by_both)
    found = []
    monkeypatch.setattr(hosts, "process_count", lambda: 2)
    # What the other process sends.
    monkeypatch.setattr(hosts, "gather", lambda own: [own, grids])
    for here in (0, 1):
        monkeypatch.setattr(hosts, "process_index", lambda here=here: here)
        found.append(laid_out(road, played, shape))
    for step in found:
        for part, other in zip(step.microbatches, found[0].microbatches, strict=True):
            assert all(
                (a == b).all()
                for a, b in zip(jax.tree.leaves(part), jax.tree.leaves(other), strict=True)
            )
        assert step.metrics == whole.metrics and step.lengths == whole.lengths
        for a, b in zip(jax.tree.leaves(step.grpo), jax.tree.leaves(whole.grpo), strict=True):
            np.testing.assert_array_equal(a, b)
    # The bank is the parts of both, in order; every token finds the vectors that it had.
    room = shape.room(2, 2).slots
    padding = [(0, room), (0, 0), (0, 0)]
    bank = np.concatenate([np.pad(step.visual, padding)[:room] for step in found])
    (part,), (single,) = found[0].microbatches, whole.microbatches
    shown = part.visual_index >= 0
    assert shown.any() and (shown == (single.visual_index >= 0)).all()
    np.testing.assert_array_equal(
        bank[part.visual_index[shown]], whole.visual[single.visual_index[shown]]
    )
    assert found[0].visual.any() and found[1].visual.any()


def whole_grids(road, rollouts) -> dict:
    """The grids of all prompts, by the number of the prompt."""
    features = road.environment.features
    mains = [group.episodes[0].trajectory for group in rollouts.groups]
    return {n: tuple(map(features.grid, main.frames)) for n, main in enumerate(mains)}


def test_a_group_whose_frames_can_no_longer_be_read_is_left_out(road, small, shape, monkeypatch):
    one = road.data.questions[0]
    other = next(question for question in road.data.questions if question.video != one.video)
    rollouts = rolled_out(road, small.Script(road), [one, other])
    gone = one.video
    read = FrameFeatures.cached

    def call(features, frames):
        if frames and frames[0].video == gone:
            raise VideoError(road.data.root / gone, "gone")
        return read(features, frames)

    monkeypatch.setattr(FrameFeatures, "cached", call)
    step = laid_out(road, rollouts, shape)
    assert step.rollouts.groups == rollouts.groups[1:]
    assert step.rollouts.unreadable == rollouts.unreadable + 1
    alone = laid_out(road, rollouts.without([0]), shape)
    np.testing.assert_array_equal(step.grpo.rewards, alone.grpo.rewards)
    np.testing.assert_array_equal(step.grpo.mask, alone.grpo.mask)
    with pytest.raises(ValueError, match=f"rl: no question of step 1 .*{road.data.root}"):
        laid_out(road, rollouts.without([1]), shape)


def test_the_gap_is_that_of_the_current_weights(road, small, shape):
    """Tokens of older weights differ from what the update computes for a good reason."""
    rollouts = rolled_out(road, small.Script(road), road.data.questions[:2])
    versions = rollouts.episodes[0].trajectory.versions
    now = int(versions.max())
    shape = road.run.rl_shape
    sizes = shape.microbatches(shape.tokens, devices=1, pieces=1)[:1]
    given = (road.environment, StepRoom(shape, sizes))
    every, none = (lay_out(rollouts, *given, version=now + later) for later in (0, 1))
    np.testing.assert_array_equal(every.grpo.current, every.grpo.mask)
    assert (every.current, none.current) == (1.0, 0.0)
    assert not np.asarray(none.grpo.current).any()
    assert lay_out(rollouts, *given).grpo.current is None


# --- micro-batches and old rollouts ---


@pytest.mark.slow
def test_micro_batches_change_nothing(road, small, start):
    parts = anchored_learner(road, microbatch_tokens=1)
    whole, figures = take_step(
        anchored_learner(road),
        start,
        small.Script(road),
        road.environment,
        road.data.questions[:2],
        seed=0,
    )
    cut, others = take_step(
        parts, parts.initial, small.Script(road), road.environment, road.data.questions[:2], seed=0
    )
    assert others["packing/microbatches"] > figures["packing/microbatches"]
    for name in ("loss", "grad_norm", "logprob_gap", "capped_fraction"):
        assert others[name] == pytest.approx(figures[name], rel=1e-4, abs=1e-6), name
    # Adam divides a gradient by its size, so rounding decides the sign of a gradient near 0.
    for a, b in zip(jax.tree.leaves(cut.weights), jax.tree.leaves(whole.weights), strict=True):
        assert np.mean(np.abs(np.asarray(a) - np.asarray(b)) > 1e-5) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("updates", [1, 2])
def test_every_size_is_compiled_before_the_first_step(road, small, start, updates):
    """Steps that need other sizes later compile nothing; later updates have their own programs."""
    cut = anchored_learner(road, microbatch_tokens=600, updates_per_batch=updates)
    assert len(cut.room.sizes) > 1
    programs = list(cut.lowerings(start, road.environment.features))
    # The reference, the updates, and the optimizer.
    assert len(programs) == (1 + updates) * len(cut.room.sizes) + 1
    compile_ahead(programs)
    names = CompiledNames()
    cut.warm_up(start.weights, road.environment.features)
    sizes = (cut.logprobs.jitted, cut.updater.add.jitted)
    compiled = [program._cache_size() for program in sizes]
    assert compiled == [len(cut.room.sizes), updates * len(cut.room.sizes)]
    sampler = small.Script(road)
    one, other = road.data.questions[:2]
    for questions in ((one, other), (lost(one), other)):
        start, _ = take_step(cut, start, sampler, road.environment, questions)
    assert [program._cache_size() for program in sizes] == compiled
    assert not {"jit(logprobs)", "jit(add_gradients)", "jit(apply_gradients)"} & set(names), names


def test_tokens_that_are_too_old_for_an_update_are_refused(road, small):
    class Ageing(small.Script):
        """The turn after the crops has newer weights."""

        def _sample(self, request) -> Sample:
            sample = super()._sample(request)
            late = "<tool_response>" in self.vocabulary.decode(request.ids)
            versions = np.full(len(sample.ids), 9 if late else 8, np.int32)
            return dataclasses.replace(sample, versions=versions)

    rollouts = rolled_out(road, Ageing(road), road.data.questions[:2])
    assert {age for ages in token_ages(rollouts, 9) for age in ages.tolist()} == {0, 1}
    require_fresh(rollouts, 9, 1)
    require_fresh(rollouts, 10, 2)
    for version, staleness, named in ((9, 0, 8), (10, 1, 8), (8, 2, 9)):
        with pytest.raises(ValueError, match=rf"version {named} .*version {version}"):
            require_fresh(rollouts, version, staleness)


def test_rollouts_of_other_weights_are_refused(road, small, learner, start):
    """The engine of the second step still has the weights from before the first."""
    state, _ = take_step(
        learner, start, small.Script(road), road.environment, road.data.questions[:2], seed=0
    )
    with pytest.raises(ValueError, match="version 0 .*version 1"):
        take_step(
            learner, state, small.Script(road), road.environment, road.data.questions[:2], seed=0
        )


# --- settings ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"save_every": 0}, r"rl\.save_every: 0"),
        ({"microbatch_tokens": -1}, r"rl\.microbatch_tokens: -1"),
        ({"prompts": 0}, r"rl\.prompts: 0"),
        ({"remat": "half"}, r"rl\.remat: 'half'"),
        ({"temperature": 0.0}, r"rl\.temperature: 0\.0"),
        ({"frame_budgets": ()}, r"rl\.frame_budgets: \(\)"),
        ({"frame_budgets": (4, 0)}, r"rl\.frame_budgets: \(4, 0\)"),
        (
            {"rewards": RewardSettings(format_weight=0.0)},
            r"rl\.grpo\.anchor: 'sequence' .*rl\.rewards\.format_weight 0",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        RLSettings(**({"steps": 2} | change))


def test_the_norm_of_an_update_is_that_of_its_gradients(road):
    updater = road_learner(road).updater
    ones = jax.tree.map(jnp.ones_like, updater.initial.weights)
    _, norm = updater.apply(updater.initial, ones)
    assert norm == pytest.approx(np.sqrt(sum(x.size for x in jax.tree.leaves(ones))), rel=1e-5)
