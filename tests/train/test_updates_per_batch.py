"""Several updates per batch: clips act from the second update on, and steps are counted right."""

from __future__ import annotations

import dataclasses
import signal
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
from paravt_jax.processes.exit_codes import Stopped
from paravt_jax.processes.interrupts import Interrupts
from tests.train.steps import road_learner, take_step, take_whole_step
from train.durable.metrics import read_metrics
from train.learn.optimizer import OptimizerSettings, make_optimizer
from train.learn.placement import put_vectors
from train.learn.rl import Learner, rl_loss
from train.learn.rl_batch import RLBatch, lay_out
from train.learn.rl_settings import RLSettings
from train.run import execute

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


@pytest.mark.slow
def test_a_run_stopped_between_steps_ends_bit_for_bit_like_an_uninterrupted_one(small, tmp_path):
    """With two updates per step."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"

    def short(folder: Any) -> Any:
        fields = {"rl.updates_per_batch": 2, "rl.save_every": 1}
        return small.shortened(small.small(), folder, **fields)

    class AfterTheFirstStep(Interrupts):
        def agree(self):
            rows = read_metrics(stopped / "metrics.jsonl")
            return signal.SIGTERM if any(row["phase"] == "rl" for row in rows) else None

    execute(short(whole))
    with pytest.raises(Stopped, match="after PARA-GRPO 1/2"):
        execute(short(stopped), AfterTheFirstStep())
    execute(short(stopped))

    def steps(folder: Any) -> list[dict[str, Any]]:
        return [row for row in read_metrics(folder / "metrics.jsonl") if row["phase"] == "rl"]

    names = ("loss", "grad_norm", "ratio_max", "reward/total")
    ours, theirs = (
        [[row[name] for name in names] for row in steps(folder)] for folder in (stopped, whole)
    )
    assert ours == theirs and len(ours) == 2
    models = [(folder / "model" / "model.safetensors").read_bytes() for folder in (stopped, whole)]
    assert models[0] == models[1]


@pytest.mark.parametrize(
    "grpo",
    [GRPOSettings(clip=0.3), GRPOSettings(upper_clip=0.28), GRPOSettings(dual_clip=3.0)],
    ids=["clip", "upper_clip", "dual_clip"],
)
def test_a_clip_that_cannot_act_is_refused(grpo):
    with pytest.raises(ValueError, match=r"rl\.grpo\.\w+: [\d.]+ with rl\.updates_per_batch 1; .*"):
        RLSettings(steps=2, grpo=grpo)
    RLSettings(steps=2, grpo=grpo, updates_per_batch=2)
