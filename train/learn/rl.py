"""PARA-GRPO on the trainer's side: lay out rollouts, score them, update the weights.

The formulas are in `paravt_jax.method.grpo`, the loop in `train.rl`. The update scores exactly the
tokens that were sampled: the metric `token_mismatches` counts exceptions.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from models.config import ModelConfig
from models.features import FrameFeatures
from models.sharding import Lowering, MeshProgram, require_mesh, row_devices
from models.text import TextDecoder
from models.trained import Skeleton, in_activations, split_vision
from paravt_jax.method.grpo.advantages import compute_advantages
from paravt_jax.method.grpo.batch import GRPOBatch, Metrics, Totals
from paravt_jax.method.grpo.loss import batch_totals, paravt_loss
from rollout.agent.episode import Environment
from train.learn.batch import Microbatch
from train.learn.optimizer import make_optimizer
from train.learn.packing import StepRoom, StepShape
from train.learn.placement import Bank, BankPlacer, put, row_pieces
from train.learn.rl_batch import LaidOut, RLBatch, lay_out, lay_out_padding
from train.learn.rl_settings import RLSettings
from train.learn.rollouts import Rollouts
from train.learn.update import (
    Loss,
    MicrobatchMetrics,
    TrainState,
    Updater,
    init_state,
    like,
    make_logprobs,
    score_rollouts,
    to_floats,
)

# Log-probs of the first update of a step, which later updates compare theirs with. They come with
# the metrics, because the gradient computes them anyway.
_LOGPROBS = "logprobs"


class StepBatch(NamedTuple):
    """The rollouts of a step as arrays on the mesh."""

    laid_out: LaidOut
    """The same in the host's memory."""
    bank: Bank
    """What is cached of frames."""
    microbatches: tuple[Microbatch, ...]
    played: GRPOBatch
    """The rollouts, before the reference has scored them: its log-probs are 0."""


class ScoredBatch(NamedTuple):
    """The rollouts of a step with their advantages: the input of an update."""

    step: StepBatch
    rollouts: RLBatch
    """What the loss reads."""
    metrics: MicrobatchMetrics
    """Of the advantages."""


def rl_loss(settings: RLSettings) -> Loss:
    """Return the loss of PARA-GRPO on a micro-batch."""

    def loss(
        text: TextDecoder, visual: Float[Array, "*m c d"], microbatch: Microbatch, batch: RLBatch
    ) -> tuple[Float[Array, ""], Metrics]:
        logprobs = score_rollouts(text, visual, microbatch, settings.temperature, settings.remat)
        here = dataclasses.replace(batch.grpo, mask=batch.grpo.mask & (microbatch.index >= 0))
        gamma = settings.rewards.gamma
        value, metrics = paravt_loss(
            logprobs, batch.advantages, here, settings.grpo, batch.totals, gamma
        )
        if settings.updates_per_batch > 1 and here.proximal is None:
            metrics[_LOGPROBS] = jax.lax.stop_gradient(logprobs)
        return value, metrics

    return loss


class Learner:
    """Runs the updates of RL on the mesh of the weights.

    Args:
        skeleton: The model without its trained weights. The frozen ones are also those of the
            reference.
        weights: The trained weights to start from, on a mesh. The first update donates them. A
            copy in the type of the activations stays as the reference of the KL term.
        config: Sizes and token ids of the model.
        settings: Settings of RL.
        shape: Upper bounds on the rollouts of a step.

    Attributes:
        initial: The state before the first update.
        reference: The reference weights, in the host's memory.
        room: Upper bounds on a step, and the sizes of its micro-batches, the largest first.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        weights: Any,
        config: ModelConfig,
        settings: RLSettings,
        shape: StepShape,
    ):
        mesh = require_mesh(weights)
        self.mesh = mesh
        self.skeleton = skeleton
        self.settings = settings
        self._weight_shardings = jax.tree.map(lambda x: x.sharding, weights)
        dtype = skeleton.decoder(split_vision(weights)[0]).dtype
        self.reference = self._to_host(weights, dtype)
        optimizer = make_optimizer(settings.optimizer, dtype)
        devices = row_devices(mesh)
        visual = shape.room(devices=devices, processes=jax.process_count())
        self._put_bank = BankPlacer(mesh, visual, skeleton.vision)
        initial = init_state(weights, optimizer)
        self.updater = Updater(skeleton, initial, optimizer, rl_loss(settings), visual.slots)
        self.initial = self.updater.initial
        pieces = row_pieces(config.text, mesh.shape["fsdp"], mesh.shape["tensor"])
        sizes = shape.microbatches(settings.microbatch_tokens, devices, pieces)
        self.room = StepRoom(shape, sizes, devices)
        self.logprobs = make_logprobs(skeleton, settings.temperature, mesh)
        # Short arrays, which every device has as a whole.
        self._whole = NamedSharding(mesh, PartitionSpec())

        def advantages(batch: GRPOBatch) -> tuple[Float[Array, "b t"], Totals, Metrics]:
            values, metrics = compute_advantages(batch, settings.grpo, settings.rewards.gamma)
            return values, batch_totals(batch), metrics

        self._advantages = MeshProgram(jax.jit(advantages, out_shardings=self._whole), mesh)

    def lay_out(self, rollouts: Rollouts, environment: Environment, step: int) -> StepBatch:
        """Lay out rollouts as arrays, and put them on the mesh.

        Args:
            rollouts: The rollouts of all processes, on every process.
            environment: The vocabulary, and the frames' features.
            step: Number of the step, from 0.

        Raises:
            ValueError: No question has a readable video.
        """
        version = step if self.settings.max_staleness else None
        return self._put(lay_out(rollouts, environment, self.room, version, step))

    def score(self, batch: StepBatch) -> ScoredBatch:
        """Return the batch with the log-probs of the reference, and advantages."""
        logprobs = self.reference_logprobs(batch.bank, batch.microbatches)
        return self._with_advantages(
            batch._replace(played=dataclasses.replace(batch.played, reference=logprobs))
        )

    def _with_advantages(self, batch: StepBatch) -> ScoredBatch:
        advantages, totals, metrics = self._advantages(batch.played)
        rollouts = RLBatch(batch.played, advantages, totals)
        return ScoredBatch(batch, rollouts, {name: [value] for name, value in metrics.items()})

    def update(self, state: TrainState, batch: ScoredBatch) -> tuple[TrainState, dict[str, float]]:
        """Make all updates of a step, and wait for them.

        Args:
            state: The state before the step; donated. `state.step` counts updates, of which each
                step makes `updates_per_batch`.
            batch: The step's rollouts, from `score`.

        Returns:
            The new state, and the metrics of the loss: means over the updates.
        """
        step, rollouts, updates = batch.step, batch.rollouts, []
        for _ in range(self.settings.updates_per_batch):
            gradients, metrics = self.updater.gradients(
                state.weights, step.bank, step.microbatches, rollouts
            )
            state, norm = self.updater.apply(state, gradients)
            rollouts = self._after_the_first(rollouts, metrics)
            updates.append(metrics | {"grad_norm": [norm]})
        figures = _over_updates([to_floats(each) for each in updates]) | to_floats(batch.metrics)
        # The names that the report reads.
        figures["groups/silent"] = figures.pop("silent_groups")
        gap = figures.pop("behaviour_gap")
        if step.laid_out.current:
            # The loss divides by the number of all tokens.
            figures["logprob_gap"] = gap / step.laid_out.current
        return state, figures

    def warm_up(self, weights: Any, features: FrameFeatures) -> None:
        """Compile the programs for every size of micro-batch, by computing an empty one of each.

        Args:
            weights: The current weights, which do not change.
            features: Gives the size and type of visual vectors.
        """
        step, rollouts, _ = self._padding(features)
        self.reference_logprobs(step.bank, step.microbatches)
        for _ in range(min(2, self.settings.updates_per_batch)):
            _, metrics = self.updater.gradients(weights, step.bank, step.microbatches, rollouts)
            rollouts = self._after_the_first(rollouts, metrics)

    def lowerings(self, state: TrainState, features: FrameFeatures) -> Iterator[Lowering]:
        """Return the programs that take long to compile, those of the largest micro-batches first.

        Args:
            state: The current state.
            features: Gives the size and type of visual vectors.
        """
        (_, bank, microbatches, _), first, _ = self._padding(features)
        batches = [first]
        if self.settings.updates_per_batch > 1:
            batches.append(first.later(like(first.advantages, self._whole)))
        inputs = [(microbatch, batch) for microbatch in microbatches for batch in batches]
        yield from self.updater.lowerings(state, bank, inputs)
        _, vision = split_vision(state.weights)
        visual = self.updater.abstract_visual(vision, bank)
        reference, reference_vision = split_vision(like(self.reference, self._weight_shardings))
        if self.updater.vision is not None and _types(reference_vision) != _types(vision):
            yield functools.partial(self.updater.vision.encode.lower, reference_vision, bank)
        for microbatch in microbatches:
            yield functools.partial(self.logprobs.lower, reference, visual, microbatch)

    def reference_logprobs(
        self, bank: Bank, microbatches: Sequence[Microbatch]
    ) -> Float[Array, "r u"]:
        """Return log-probs under the reference weights, which leave the devices afterwards."""
        text, vision = split_vision(jax.device_put(self.reference, self._weight_shardings))
        visual = self.updater.visual(vision, bank)
        # A token is in one micro-batch, and 0 in all others.
        logprobs = [self.logprobs(text, visual, each) for each in microbatches]
        # The weights are freed on return, before the update needs their memory.
        return jax.block_until_ready(functools.reduce(jnp.add, logprobs))

    def _padding(self, features: FrameFeatures) -> ScoredBatch:
        """Return a step without rollouts, with an empty micro-batch of every size."""
        stale = self.settings.max_staleness > 0
        empty = lay_out_padding(self.room, features, stale)
        return self._with_advantages(self._put(empty))

    def _put(self, laid_out: LaidOut) -> StepBatch:
        bank = self._put_bank(laid_out.visual, laid_out.grids)
        microbatches = tuple(put(each, self.mesh, whole=True) for each in laid_out.microbatches)
        played = put(laid_out.grpo, self.mesh)
        return StepBatch(laid_out, bank, microbatches, played)

    def _after_the_first(self, batch: RLBatch, metrics: MicrobatchMetrics) -> RLBatch:
        """Return the batch of later updates.

        Takes the log-probs of the first update out of its metrics.
        """
        if _LOGPROBS not in metrics:
            return batch
        # A token is in one micro-batch, and 0 in all others.
        proximal = functools.reduce(jnp.add, metrics.pop(_LOGPROBS))
        return batch.later(jax.device_put(proximal, self._whole))

    def _to_host(self, weights: Any, dtype: Any) -> Any:
        """Return a copy of the weights in `dtype`, in the host's memory."""
        # The decoder multiplies in the type of the activations; more digits would be rounded away.
        shardings = jax.tree.map(
            lambda sharding: sharding.with_memory_kind("pinned_host"), self._weight_shardings
        )

        def reference_to_host(weights: Any) -> Any:
            return in_activations(weights, dtype)

        return jax.jit(reference_to_host, out_shardings=shardings)(weights)


def _types(arrays: Any) -> list[Any]:
    return [x.dtype for x in jax.tree.leaves(arrays)]


def _over_updates(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the updates that have it; of `*_max` the largest."""
    names = dict.fromkeys(itertools.chain(*updates))
    values = {name: [update[name] for update in updates if name in update] for name in names}
    return {
        name: max(each) if name.endswith("_max") else sum(each) / len(each)
        for name, each in values.items()
    }
