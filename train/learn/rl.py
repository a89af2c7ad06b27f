"""PARA-GRPO, one step at a time: play episodes, lay out a batch, update, load the new weights.

The formulas are in `paravt_jax.method.grpo` and the episodes in `rollout.agent.episode`. A step
depends on its number, the seed, the weights and the questions, and on nothing else. The update
scores exactly the tokens that were sampled: the metric `token_mismatches` counts exceptions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

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
from paravt_jax.processes import hosts
from rollout.agent.episode import Environment
from rollout.engine.requests import Sampler
from train.learn.batch import BatchShape, Sequences
from train.learn.optimizer import make_optimizer
from train.learn.placement import fitted, place, share_of_groups
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


@runtime_checkable
class TrainedSampler(Sampler, Protocol):
    """A sampler that gets new weights after each step: the engine, or a script in a test."""

    def sleep(self) -> None:
        """Free weights and KV cache until the next `load`."""
        ...

    def load(self, weights: Any, version: int) -> None:
        """Sample under `weights`, those after `version` updates, from now on."""
        ...


def rl_loss(image_token_id: int, settings: RLSettings) -> Loss:
    """The loss of PARA-GRPO on an `RLBatch` or one of its micro-batches."""

    def loss(text: TextDecoder, batch: RLBatch) -> tuple[Float[Array, ""], Metrics]:
        # Main agents and sub-agents have shapes of their own: one pass through the model each.
        logprobs = [
            row_logprobs(
                text,
                sequences,
                image_token_id,
                settings.temperature,
                settings.remat,
                settings.logprob_chunk,
            )
            for sequences in batch.sequences
        ]
        return grpo.paravt_loss(
            stack_rows(logprobs),
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
    """Compile the update of PARA-GRPO: `f(state, RLBatch) -> (state, metrics)`.

    Args:
        graph: The decoder without its weights.
        optimizer: The optimizer whose state `state` has.
        image_token_id: Id of the placeholder tokens that visual vectors replace.
        settings: Settings of the loss.
        parts: Number of micro-batches.
        state: A real or abstract state, with the shardings that updates keep.
    """

    def split(batch: RLBatch) -> RLBatch:
        return split_rl_batch(batch, parts)

    loss = rl_loss(image_token_id, settings)
    return make_update(graph, optimizer, loss, state, split if parts > 1 else None)


class Learner:
    """Runs the steps of RL on the mesh of the weights.

    Args:
        graph: The decoder without its weights.
        weights: The weights to start from, on a mesh. The first update donates them. A copy in the
            type of the activations stays as the reference of the KL term.
        config: Sizes and token ids of the model.
        settings: Settings of RL.
        shapes: Shapes of a step's batch, from `RLSettings.shapes`.
        judge: Scores open-ended answers; None: rules score them (`paravt_jax.method.accuracy`).
        sync: Brings weights to the engine's devices; None: made here.
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
        mesh = mesh_of(weights)
        assert mesh is not None, (
            "weights without a mesh; shard them with models.sharding.param_shardings"
        )
        self.mesh = mesh
        self.settings = settings
        self.judge = judge
        dtype = nnx.merge(graph, weights).dtype
        self.sync = sync or WeightSync(weights, dtype)
        self._weight_shardings = jax.tree.map(lambda x: x.sharding, weights)
        self.reference = self._to_host(weights, dtype)
        optimizer = make_optimizer(settings.optimizer, settings.steps)
        self.start = init_state(weights, optimizer)
        padded, parts = fitted(shapes, settings.microbatches, mesh)
        self._shapes = tuple(share_of_groups(shape) for shape in padded)
        self.logprobs = make_logprobs(
            graph, config.image_token_id, settings.temperature, settings.logprob_chunk, mesh, parts
        )
        self._advantages = MeshProgram(jax.jit(lambda batch: _advantages(batch, settings)), mesh)
        self.update = make_rl_update(
            graph, optimizer, config.image_token_id, settings, parts, self.start
        )

    def step(
        self,
        state: TrainState,
        engine: TrainedSampler,
        environment: Environment,
        questions: Sequence[Question],
        seed: int,
        on_rollouts: Callable[..., None] | None = None,
        play: Callable[..., Rollouts] = roll_out,
        measure: Callable[[Sequence[Sequences], float], dict[str, float]] | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """Run one step of PARA-GRPO, and load the new weights into the engine.

        The engine sleeps after the rollouts until it gets the new weights: the update needs its
        memory.

        Args:
            state: The state before the step; donated. `state.step` is the step's number.
            engine: Samples under the weights of `state`.
            environment: The protocol, and the frames' features.
            questions: Questions of the whole step, the same on every process.
            seed: Seed of the run.
            on_rollouts: Called with this process's rollouts and the advantages of all rows,
                float32[b, t].
            play: Plays and scores episodes; takes the arguments of `roll_out`.
            measure: Called with the arrays of the update and its duration in seconds; returns
                further metrics.

        Returns:
            The new state, and the step's metrics. Times are in seconds.

        Raises:
            ValueError: No question has a readable video, or a token was sampled under other
                weights than those of this step.
        """
        number = int(state.step)
        times = [time.perf_counter()]
        own = play(engine, environment, questions, self.settings, seed, number, self.judge)
        engine.sleep()
        rollouts_by_process = hosts.gather(own)
        rollouts = join(rollouts_by_process)
        if not rollouts.groups:
            raise ValueError(
                f"rl: step {number} has no question with a readable video; check the data root"
            )
        require_current(rollouts, number)
        times.append(time.perf_counter())

        # 0x5A sets the draw of sub-agents apart from other draws with the same seed and step.
        sequences, owners, counts = lay_out(
            rollouts_by_process, environment.features, self._shapes, (seed, number, 0x5A)
        )
        counts = _sum_over_processes(counts)
        placed = place(sequences, self.mesh)
        times.append(time.perf_counter())

        reference = self._reference_logprobs(placed)
        times.append(time.perf_counter())

        vocabulary = environment.protocol.vocabulary
        batch = as_grpo_batch(own, placed, owners, reference, vocabulary, self._shapes, self.mesh)
        advantages, totals, advantage_metrics = self._advantages(batch)
        if on_rollouts:
            on_rollouts(own, multihost_utils.process_allgather(advantages, tiled=True))
        state, update_metrics = self.update(state, RLBatch(placed, batch, advantages, totals))
        # `_known` waits for the update, so the times below include it.
        metrics = _known(advantage_metrics | update_metrics)
        # Loading allocates the engine's pages. Block until the sync has freed its own memory.
        engine.load(jax.block_until_ready(self.sync(state.weights)), number + 1)
        times.append(time.perf_counter())

        metrics["groups/silent"] = metrics.pop("silent_groups")
        metrics["logprob_gap"] = metrics.pop("behaviour_gap")
        metrics |= describe(rollouts)
        metrics |= counts
        phases = ("rollout", "data", "reference", "update")
        seconds = dict(zip(phases, np.diff(times).tolist(), strict=True))
        metrics |= {f"time/{phase}": span for phase, span in seconds.items()}
        if measure is not None:
            metrics |= measure(placed, seconds["update"])
        if self.judge is not None:
            metrics |= _sum_over_processes(self.judge.metrics())
        return state, metrics

    def _to_host(self, weights: Any, dtype: Any) -> Any:
        """A copy of the weights in `dtype`, in the host's memory."""
        # The decoder multiplies in the type of the activations; more digits would be rounded away.
        shardings = jax.tree.map(
            lambda sharding: sharding.with_memory_kind("pinned_host"), self._weight_shardings
        )

        def cast(weights: Any) -> Any:
            return jax.tree.map(lambda x: x.astype(dtype), weights)

        return jax.jit(cast, out_shardings=shardings)(weights)

    def _reference_logprobs(self, placed: tuple[Sequences, ...]) -> tuple[jax.Array, ...]:
        """Log-probs under the reference weights, which are on the devices only in this call."""
        weights = jax.device_put(self.reference, self._weight_shardings)
        logprobs = tuple(self.logprobs(weights, sequences) for sequences in placed)
        # The weights are freed on return, before the update needs their memory.
        return jax.block_until_ready(logprobs)


def _advantages(
    batch: GRPOBatch, settings: RLSettings
) -> tuple[Float[Array, "b t"], Totals, Metrics]:
    advantages, metrics = grpo.advantages(batch, settings.grpo, settings.rewards.gamma)
    return advantages, grpo.batch_totals(batch), metrics


def _known(metrics: Metrics) -> dict[str, float]:
    """The metrics as numbers, without means over tags that were never sampled."""
    numbers = {name: float(x) for name, x in metrics.items()}

    def empty(name: str) -> bool:
        group, _, figure = name.rpartition("/")
        return figure in ("probability", "logprob") and numbers[f"{group}/count"] == 0

    return {name: number for name, number in numbers.items() if not empty(name)}


def _sum_over_processes(counts: dict[str, float]) -> dict[str, float]:
    """Every process's counts, added by name."""
    parts = hosts.gather(counts)
    return {name: sum(part[name] for part in parts) for name in counts}
