"""PARA-GRPO, one step at a time: draw, roll out, score, update.

Owns the course of a step; the algorithm's formulas are `paravt_jax.method.grpo`'s, the episodes
`rollout.agent.episode`'s. Invariant: a step is a function of (seed, step number, weights, questions) alone, and the tokens that are
scored are the tokens that were sampled (`token_mismatches` counts the exceptions).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jaxtyping import Array, Float

from models.qwen3_vl.config import Qwen3VLConfig
from models.qwen3_vl.text import TextDecoder
from paravt_jax.method import grpo
from paravt_jax.method.grpo import GRPOBatch, Metrics, Totals
from paravt_jax.method.judge import Judge
from paravt_jax.method.records import Question
from rollout.agent.episode import Environment
from rollout.engine.engine import Engine
from train.durable import hosts
from train.learn.batch import BatchShape, Sequences
from train.learn.optimizer import make_optimizer
from train.learn.placement import fitted, own, place
from train.learn.rl_batch import RLBatch, as_grpo_batch, lay_out, split_rl_batch, stack_rows
from train.learn.rl_settings import RLSettings
from train.learn.rollouts import Rollouts, describe, join, require_current, roll_out
from train.learn.step import (
    Loss,
    MeshProgram,
    TrainState,
    init_state,
    make_logprobs,
    make_update,
    mesh_of,
    row_logprobs,
)
from train.learn.weight_sync import WeightSync


def rl_loss(image_token_id: int, settings: RLSettings) -> Loss:
    """PARA-GRPO's loss of an `RLBatch`, or of its micro-batches."""

    def loss(text: TextDecoder, batch: RLBatch) -> tuple[Float[Array, ""], Metrics]:
        rows = [
            row_logprobs(
                text,
                s,
                image_token_id,
                settings.temperature,
                settings.remat,
                settings.logprob_chunk,
            )
            for s in batch.sequences
        ]
        return grpo.paravt_loss(
            stack_rows(rows),
            batch.advantages,
            batch.grpo,
            settings.grpo,
            batch.totals,
            settings.rewards.gamma,
        )

    return loss


def make_rl_update(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    image_token_id: int,
    settings: RLSettings,
    parts: int,
    state: TrainState,
) -> MeshProgram:
    """The update of PARA-GRPO in `parts` micro-batches, `f(state, RLBatch) -> (state, metrics)`."""
    cut = (lambda batch: split_rl_batch(batch, parts)) if parts > 1 else None
    return make_update(graph, optimizer, rl_loss(image_token_id, settings), state, cut)


class Learner:
    """The jitted programs of RL and how a step runs through them, on the mesh of the weights.

    `weights` are those it starts from, which the first update takes, and is held to: the `reference` is their copy in the activations'
    type, in which they multiply, and waits in the host's memory for its turn. `shapes` are
    those of `RLSettings.shapes`. `sync` brings new weights to the engine.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        weights: Any,
        config: Qwen3VLConfig,
        settings: RLSettings,
        shapes: Sequence[BatchShape],
        judge: Judge | None = None,
        sync: WeightSync | None = None,
    ):
        self.settings, self.judge = settings, judge
        dtype = nnx.merge(graph, weights).dtype
        self.sync = sync or WeightSync(weights, dtype)
        optimizer = make_optimizer(settings.optimizer, settings.steps)
        self._on_device = jax.tree.map(lambda x: x.sharding, weights)
        on_host = jax.tree.map(lambda place: place.with_memory_kind("pinned_host"), self._on_device)
        self.reference = jax.jit(
            lambda w: jax.tree.map(lambda x: x.astype(dtype), w), out_shardings=on_host
        )(weights)
        self.start = init_state(weights, optimizer)
        mesh = mesh_of(weights)
        assert mesh is not None, (
            "weights without a mesh; lay them on one with models.sharding.param_shardings"
        )
        self.mesh = mesh
        padded, parts = fitted(shapes, settings.microbatches, mesh)
        self._shapes = tuple(own(shape) for shape in padded)
        self._logprobs = make_logprobs(
            graph, config.image_token_id, settings.temperature, settings.logprob_chunk, mesh, parts
        )
        self._advantages = MeshProgram(
            jax.jit(lambda batch: _advantages(batch, settings)), self.mesh
        )
        self._update = make_rl_update(
            graph, optimizer, config.image_token_id, settings, parts, self.start
        )

    def step(
        self,
        state: TrainState,
        engine: Engine,
        environment: Environment,
        questions: Sequence[Question],
        seed: int,
        on_rollouts: Callable[..., None] | None = None,
        play: Callable[..., Rollouts] = roll_out,
        measure: Callable[[Sequence[Sequences], float], dict[str, float]] | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """One step of PARA-GRPO: rollouts under the engine's weights, one update, and the new weights into the engine.

        From the last rollout to the new weights the engine sleeps. `on_rollouts(rollouts, advantages)`
        may look at the episodes; `play` is what makes them. `measure(batches, seconds)` adds metrics,
        from what the update was computed on and how long it took. Returns the state and the step's
        metrics; times in seconds. Raises ValueError where no question's video can be read, and for
        rollouts of other weights than the current ones.
        """
        settings, number, clock = self.settings, int(state.step), [time.perf_counter()]
        mine = play(engine, environment, questions, settings, seed, number, self.judge)
        engine.sleep()
        parts = hosts.gather(mine)
        rollouts = join(parts)
        if not rollouts.groups:
            raise ValueError(
                f"rl: step {number} has no question with a readable video; check the data root"
            )
        require_current(rollouts, number)
        clock.append(time.perf_counter())
        sequences, owners, counts = lay_out(
            parts, environment.features, self._shapes, (seed, number, 0x5A)
        )
        everywhere = hosts.gather(counts)
        counts = {name: sum(part[name] for part in everywhere) for name in counts}
        placed = place(sequences, self.mesh)
        clock.append(time.perf_counter())
        held_to = jax.device_put(self.reference, self._on_device)
        reference = jax.block_until_ready(tuple(self._logprobs(held_to, s) for s in placed))
        del held_to
        clock.append(time.perf_counter())
        batch = as_grpo_batch(
            mine,
            placed,
            owners,
            reference,
            environment.protocol.vocabulary,
            self._shapes,
            self.mesh,
        )
        advantages, totals, figures = self._advantages(batch)
        if on_rollouts:
            on_rollouts(mine, multihost_utils.process_allgather(advantages, tiled=True))
        state, updated = self._update(state, RLBatch(placed, batch, advantages, totals))
        metrics = {name: float(value) for name, value in (figures | updated).items()}
        # The engine takes its pages back when what the sync needs beside them is gone.
        engine.load(jax.block_until_ready(self.sync(state.weights)), number + 1)
        clock.append(time.perf_counter())
        spans = dict(zip(("rollout", "data", "reference", "update"), np.diff(clock), strict=True))
        metrics |= {
            "groups/silent": metrics.pop("silent_groups"),
            "logprob_gap": metrics.pop("behaviour_gap"),
        }
        metrics |= (
            describe(rollouts)
            | counts
            | {f"time/{name}": float(span) for name, span in spans.items()}
        )
        if measure is not None:
            metrics |= measure(placed, float(spans["update"]))
        if self.judge is not None:
            asked = hosts.gather(self.judge.metrics())
            metrics |= {name: sum(part[name] for part in asked) for name in asked[0]}
        return state, metrics


def _advantages(batch: GRPOBatch, settings: RLSettings) -> tuple[Array, Totals, Metrics]:
    advantages, metrics = grpo.advantages(batch, settings.grpo, settings.rewards.gamma)
    return advantages, grpo.batch_totals(batch), metrics
