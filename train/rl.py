"""PARA-GRPO, one step at a time: draw, roll out, score, update.

Owns the course of a step; the algorithm's formulas are `paravt_jax.grpo`'s, the episodes
`rollout.episode`'s. Invariant: a step is a function of (seed, step number, weights, questions) alone, and the tokens that are
scored are the tokens that were sampled (`token_mismatches` counts the exceptions).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from models.qwen3_vl.text import TextDecoder
from paravt_jax import grpo
from paravt_jax.grpo import GRPOBatch, Metrics, Totals
from paravt_jax.judge import Judge
from paravt_jax.records import Question
from rollout.engine import Engine
from rollout.episode import Scene
from train.optimizer import make_optimizer
from train.rl_batch import RLBatch, as_grpo_batch, lay_out, split, stack_rows
from train.rl_settings import RLSettings
from train.rollouts import describe, require_fresh, roll_out
from train.step import Loss, TrainState, init_state, make_logprobs, make_update, row_logprobs


def rl_loss(image_token_id: int, settings: RLSettings) -> Loss:
    """PARA-GRPO's loss of an `RLBatch`, or of its micro-batches."""

    def loss(text: TextDecoder, batch: RLBatch) -> tuple[Float[Array, ""], Metrics]:
        rows = [
            row_logprobs(text, s, image_token_id, settings.temperature, settings.remat, settings.logprob_chunk) for s in batch.sequences
        ]
        return grpo.paravt_loss(stack_rows(rows), batch.advantages, batch.grpo, settings.grpo, batch.totals, settings.rewards.gamma)

    return loss


class Learner:
    """The jitted programs of RL and how a step runs through them. `reference` are the weights it starts from and is held to."""

    def __init__(self, graph: nnx.GraphDef, reference: Any, image_token_id: int, settings: RLSettings, judge: Judge | None = None):
        self.settings, self.reference, self.judge = settings, reference, judge
        optimizer = make_optimizer(settings.optimizer, settings.steps)
        self.start = init_state(jax.tree.map(jnp.copy, reference), optimizer)  # copies: an update donates its state
        self._logprobs = make_logprobs(graph, image_token_id, settings.temperature, settings.logprob_chunk)
        self._advantages = jax.jit(lambda batch: _advantages(batch, settings))
        parts = settings.microbatches
        cut = (lambda batch: split(batch, parts)) if parts > 1 else None
        self._update = make_update(graph, optimizer, rl_loss(image_token_id, settings), self.start, cut)

    def step(
        self,
        state: TrainState,
        engine: Engine,
        scene: Scene,
        questions: Sequence[Question],
        seed: int,
        on_rollouts: Callable[..., None] | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """One step of PARA-GRPO: rollouts under the engine's weights, one update, and the new weights into the engine.

        `on_rollouts(rollouts, advantages)` may look at the episodes. Returns the state and the step's metrics; times in seconds.
        Raises ValueError where no question's video can be read, and for rollouts older than `max_staleness`.
        """
        settings, number, clock = self.settings, int(state.step), [time.perf_counter()]
        rollouts = roll_out(engine, scene, questions, settings, seed, number, self.judge)
        if not rollouts.groups:
            raise ValueError(f"rl: step {number} has no question with a readable video; check the data root")
        stale = require_fresh(rollouts, number, settings.max_staleness)
        clock.append(time.perf_counter())
        sequences, owners, counts = lay_out(rollouts, scene.features, settings.shape, settings.subagents, (seed, number, 0x5A))
        clock.append(time.perf_counter())
        reference = jax.block_until_ready(stack_rows([self._logprobs(self.reference, s) for s in sequences]))
        clock.append(time.perf_counter())
        batch = as_grpo_batch(rollouts, sequences, owners, reference, scene.protocol.vocabulary, settings.shape)
        advantages, totals, figures = self._advantages(batch)
        if on_rollouts:
            on_rollouts(rollouts, np.asarray(advantages))
        state, updated = self._update(state, RLBatch(sequences, batch, advantages, totals))
        metrics = {name: float(value) for name, value in (figures | updated).items()}
        engine.load(state.weights, number + 1)
        clock.append(time.perf_counter())
        spans = dict(zip(("rollout", "data", "reference", "update"), np.diff(clock), strict=True))
        metrics |= {"groups/silent": metrics.pop("silent_groups"), "logprob_gap": metrics.pop("behaviour_gap"), "staleness": float(stale)}
        metrics |= describe(rollouts) | counts | {f"time/{name}": float(span) for name, span in spans.items()}
        if self.judge is not None:
            metrics |= self.judge.counts.metrics()
        return state, metrics


def _advantages(batch: GRPOBatch, settings: RLSettings) -> tuple[Array, Totals, Metrics]:
    advantages, metrics = grpo.advantages(batch, settings.grpo, settings.rewards.gamma)
    return advantages, grpo.batch_totals(batch), metrics
