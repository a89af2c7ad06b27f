"""Several updates per batch: clips act from the second update on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from models.sharding import make_mesh
from paravt_jax.method.grpo.loss import batch_totals
from paravt_jax.method.grpo.settings import GRPOSettings
from tests.train.steps import road_learner, take_step, take_whole_step
from train.learn.optimizer import OptimizerSettings, make_optimizer
from train.learn.placement import put_vectors
from train.learn.rl import Learner, rl_loss
from train.learn.rl_batch import RLBatch, lay_out
from train.learn.rl_settings import RLSettings

# Large enough to move the ratios past the clips of these tests in one update.
ADAM = OptimizerSettings(learning_rate=3e-3)


def learner_of(road, updates: int = 2, **changes: Any) -> Learner:
    rl = road.run.rl
    grpo = dataclasses.replace(rl.grpo, anchor="none", **changes)
    settings = dataclasses.replace(rl, updates_per_batch=updates, grpo=grpo, optimizer=ADAM)
    return road_learner(road, settings, road.run.rl_shape)


def one_step(road, small, learner: Learner) -> tuple[Any, dict[str, float]]:
    questions = road.data.questions[:2]
    return take_step(learner, learner.initial, small.Script(road), road.environment, questions)


def differ(one: Any, other: Any) -> bool:
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return any((np.asarray(a) != np.asarray(b)).any() for a, b in leaves)


@pytest.fixture(scope="module")
def unclipped(road, small):
    """State and metrics of a step with two updates whose ratios no clip bounds."""
    return one_step(road, small, learner_of(road, clip=0.99, upper_clip=99.0))


@pytest.mark.slow
def test_clips_act_in_the_second_update(road, small, unclipped):
    state, metrics = one_step(road, small, learner_of(road, clip=0.01, upper_clip=99.0))
    free, before = unclipped
    assert before["clip_fraction"] == 0
    assert 0 < metrics["clip_fraction"] < 1 < metrics["ratio_max"]
    assert metrics["ratio_max"] == pytest.approx(before["ratio_max"], rel=1e-4)
    assert differ(state.weights, free.weights)


@pytest.mark.slow
def test_the_second_gradient_is_that_of_the_first_updates_weights(road, small, unclipped):
    """Computed again in one piece: ratios to log-probs under the weights before the step."""
    learner = learner_of(road, updates=1)
    questions = road.data.questions[:2]
    first, trained, metrics = take_whole_step(
        learner, learner.initial, small.Script(road), road.environment, questions
    )
    shape, mesh = road.run.rl_shape, make_mesh(1, 1, 1)
    step = lay_out(trained.rollouts, road.environment, learner.room)
    visual = put_vectors([step.visual], shape.room(1, 1).slots, mesh)
    before: Any = sum(learner.logprobs(road.fresh(), visual, part) for part in step.microbatches)
    # The reference is what the step began with.
    played_again = dataclasses.replace(step.grpo, reference=before)
    advantages = jnp.asarray(trained.advantages)
    batch = RLBatch(played_again, advantages, batch_totals(played_again)).later(before)
    batch, parts = jax.tree.map(jnp.asarray, (batch, step.microbatches))
    settings = learner_of(road, clip=0.99, upper_clip=99.0).settings
    loss = rl_loss(settings)

    def whole(weights: Any) -> Any:
        text = nnx.merge(road.graph, weights)
        return sum(loss(text, visual, part, batch)[0] for part in parts)

    value, gradients = jax.jit(jax.value_and_grad(whole))(first.weights)
    both, figures = unclipped
    # Metrics are means over both updates.
    assert 2 * figures["loss"] - metrics["loss"] == pytest.approx(float(value), rel=1e-4)
    norm = float(optax.global_norm(gradients))
    assert 2 * figures["grad_norm"] - metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    optimizer = make_optimizer(ADAM)
    changes, _ = optimizer.update(gradients, first.optimizer, first.weights)
    second = optax.apply_updates(first.weights, changes)
    # Adam divides a gradient by its size, so rounding decides the sign of a gradient near 0.
    for a, b in zip(jax.tree.leaves(second), jax.tree.leaves(both.weights), strict=True):
        assert np.mean(np.abs(np.asarray(a) - np.asarray(b)) > 1e-5) < 0.01


@pytest.mark.slow
def test_ratios_of_all_updates_are_to_the_weights_before_the_step(road, small, monkeypatch):
    """The log-probs of these weights are kept once, by the first of three updates."""
    kept = []
    later = RLBatch.later
    monkeypatch.setattr(RLBatch, "later", lambda *given: kept.append(given) or later(*given))
    one_step(road, small, learner_of(road, updates=3, clip=0.99, upper_clip=99.0))
    assert len(kept) == 1


@pytest.mark.parametrize(
    "grpo",
    [GRPOSettings(clip=0.3), GRPOSettings(upper_clip=0.28), GRPOSettings(dual_clip=3.0)],
    ids=["clip", "upper_clip", "dual_clip"],
)
def test_a_clip_that_cannot_act_is_refused(grpo):
    with pytest.raises(ValueError, match=r"rl\.grpo\.\w+: [\d.]+ with rl\.updates_per_batch 1; .*"):
        RLSettings(steps=2, grpo=grpo)
    RLSettings(steps=2, grpo=grpo, updates_per_batch=2)
