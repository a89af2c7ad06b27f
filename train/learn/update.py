"""The programs of training: log-probs of packed rows, and the one update.

SFT and PARA-GRPO differ in their loss and in what they know of the tokens. Both lay out packed rows
(`train.learn.batch`) and go through the same programs:

    bank --encode--> visual vectors            once per update, if a part of the tower is trained
    add, for every micro-batch                 gradients in float32, in a fixed order
    vectors' gradients --> the tower's         once per update, if a part of the tower is trained
    apply                                      the step of the optimizer

Gradients are added in float32, since bfloat16 would round small ones away. The fixed order makes a
resumed run equal an uninterrupted one bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float

from models.layers import Remat
from models.sharding import (
    ROWS,
    Lowering,
    MeshProgram,
    constrain,
    mesh_of,
    require_mesh,
    row_devices,
    zeros,
)
from models.text import TextDecoder, VisualBank
from models.trained import Skeleton, TrainedVision, merge_vision, split_vision
from train.learn.batch import Microbatch
from train.learn.placement import (
    Bank,
    bank_sharding,
    in_replicas,
    over_replicas,
    sums_of,
    sums_sharding,
)

# Over a vocabulary of more than this, the logits of so many tokens of a row exist at a time.
LARGE_VOCABULARY = 2**15
LOGPROB_CHUNK = 512


# Annotations are not checked, because JAX also builds this tree with shardings as leaves.
@no_type_check
@struct.dataclass
class TrainState:
    """The trained weights (`models.trained`) and the optimizer's state after `step` updates."""

    weights: Any
    optimizer: Any
    step: jax.Array


Loss = Callable[..., tuple[Float[Array, ""], dict[str, Array]]]
"""`f(decoder, visual, Microbatch, batch) -> (loss, metrics)` of a micro-batch.

It divides by totals of the whole batch, so that losses, metrics and gradients of micro-batches add
up; of a metric `*_max`, the largest counts."""

MicrobatchMetrics = dict[str, list[Array]]
"""The metrics of every micro-batch, by name."""


def init_state(weights: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """Return the state before the first update, sharded as `state_shardings` says."""
    state = TrainState(weights, optimizer.init(weights), jnp.zeros((), jnp.int32))
    return jax.device_put(state, state_shardings(state))


def state_shardings(state: TrainState) -> TrainState:
    """Return the sharding of each array of a real or abstract state, following its weights.

    A moment is sharded like its weight. Everything else, such as counters, is replicated.
    """
    of_weights = {
        jax.tree_util.keystr(path): leaf.sharding
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.weights)
    }
    mesh = mesh_of(state.weights)
    if mesh is None:
        replicated = next(iter(of_weights.values()))
    else:
        replicated = NamedSharding(mesh, PartitionSpec())

    def find(path: tuple[Any, ...], _: Any) -> Any:
        # Optimizers nest trees of moments in their own states, so the path of a moment ends with
        # the path of its weight. Try all suffixes, the longest first.
        for first in range(len(path)):
            name = jax.tree_util.keystr(path[first:])
            if name in of_weights:
                return of_weights[name]
        return replicated

    return jax.tree_util.tree_map_with_path(find, state)


def score_rollouts(
    text: TextDecoder,
    visual: Float[Array, "*m c d"],
    batch: Microbatch,
    temperature: float,
    remat: Remat = "none",
) -> Float[Array, "r u"]:
    """Score each token of the rollouts in a micro-batch.

    Args:
        text: The decoder.
        visual: The step's bank of visual vectors; its leading axes count slots.
        batch: Packed rows, and the indices of the rollouts' tokens in them.
        temperature: The temperature at which the rollouts were sampled.
        remat: Activation checkpointing policy.

    Returns:
        Log-prob of each of the u tokens of each of the step's r rollouts, given all tokens before
        it; 0 for a rollout's first token, which is the last one of its prompt, and for tokens that
        are not in this micro-batch.
    """
    # Vectors come split by slot, but any token may need any slot. Split by their width instead:
    # every device then looks up its share of all vectors.
    bank = constrain(visual.reshape(1, -1, *visual.shape[-2:]), None, None, None, ROWS)
    hidden, _ = text(
        batch.ids,
        batch.positions,
        batch.layout,
        VisualBank(bank, batch.visual_index),
        remat=remat,
    )
    # The output at token i predicts token i + 1, which may be in the next piece.
    # What follows a segment's last token is another segment's first: its log-prob is not used.
    following = jnp.roll(batch.ids.reshape(-1), -1).reshape(batch.ids.shape)
    chunk = LOGPROB_CHUNK if text.config.vocab_size > LARGE_VOCABULARY else None
    predicted = text.token_logprobs(hidden, following, temperature, chunk).reshape(-1)
    before = jnp.maximum(batch.index - 1, 0)
    first = jnp.arange(batch.index.shape[1])[None] == 0
    return jnp.where((batch.index < 0) | first, 0.0, predicted[before])


def make_logprobs(skeleton: Skeleton, temperature: float, mesh: Mesh) -> MeshProgram:
    """Compile the log-probs of a micro-batch under given weights, without gradients.

    Args:
        skeleton: The model without its trained weights.
        temperature: See `score_rollouts`.
        mesh: The mesh of weights and batch.

    Returns:
        `f(weights, visual, Microbatch) -> float32[r, u]`.
    """

    def score(arrays: Any, _: None, batch: Any) -> tuple[None, dict[str, jax.Array]]:
        frozen, weights, visual = arrays
        (microbatch,) = batch
        text = skeleton.decoder(weights, frozen)
        return None, {"all": score_rollouts(text, visual, microbatch, temperature)}

    def logprobs(frozen: Any, weights: Any, visual: jax.Array, batch: Microbatch) -> jax.Array:
        # Added over replicas: a token is in one of them, and 0 in all others.
        return in_replicas(score, mesh)((frozen, weights, visual), None, (batch,))[1]["all"]

    jitted = jax.jit(logprobs, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return MeshProgram(jitted, mesh, (skeleton.frozen,))


def _make_add(skeleton: Skeleton, loss: Loss, state: TrainState) -> MeshProgram:
    """Compile what adds the gradients of a micro-batch.

    Returns:
        `f(weights, gradients, visual, microbatch, batch) -> (gradients, metrics)`. Gradients are of
        the decoder's trained weights, or of a pair of these and the visual vectors, if a part of
        the tower is trained. They are donated; None: there are none so far.
    """
    mesh = require_mesh(state.weights)
    text, vision = split_vision(state.weights)
    placed = jax.tree.map(lambda x: sums_sharding(x.sharding, mesh), text)
    wanted: int | tuple[int, ...] = 0
    if vision is not None:
        placed, wanted = (placed, sums_sharding(bank_sharding(mesh), mesh)), (0, 1)

    def loss_and_grads(arrays: Any, total: Any, batch: Any) -> tuple[Any, dict[str, Array]]:
        frozen, weights, visual = arrays

        @jax.named_scope("forward")
        def value(weights: Any, visual: Array) -> Any:
            return loss(skeleton.decoder(weights, frozen), visual, *batch)

        (loss_value, metrics), grads = jax.value_and_grad(value, wanted, has_aux=True)(
            weights, visual
        )
        grads = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
        # A single micro-batch needs no memory for a sum.
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        return total, metrics | {"loss": loss_value}

    # Not `add`: the log of compilations names functions, and jnp.add has that name.
    def add_gradients(
        frozen: Any, weights: Any, total: Any, visual: Array, *batch: Any
    ) -> tuple[Any, dict[str, Array]]:
        return in_replicas(loss_and_grads, mesh)((frozen, weights, visual), total, batch)

    add = jax.jit(add_gradients, donate_argnums=2, out_shardings=(placed, None))
    return MeshProgram(add, mesh, (skeleton.frozen,))


def _make_apply(optimizer: optax.GradientTransformation, state: TrainState) -> MeshProgram:
    """Compile `f(state, gradients) -> (state, grad_norm)`. The state is donated."""
    mesh = require_mesh(state.weights)

    @jax.named_scope("optimizer")
    def apply_gradients(state: TrainState, total: Any) -> tuple[TrainState, Array]:
        of_text, of_vision = split_vision(total)
        total = merge_vision(over_replicas(of_text, mesh), of_vision)
        grads = jax.tree.map(lambda g, w: g.astype(w.dtype), total, state.weights)
        changes, optimizer_state = optimizer.update(grads, state.optimizer, state.weights)
        weights = optax.apply_updates(state.weights, changes)
        return TrainState(weights, optimizer_state, state.step + 1), optax.global_norm(grads)

    # The new state keeps the shardings of the old one; otherwise the next update would compile
    # again. Donation lets XLA write the new state into the old one's memory.
    apply = jax.jit(apply_gradients, donate_argnums=0, out_shardings=(state_shardings(state), None))
    return MeshProgram(apply, mesh)


class VisionPrograms(NamedTuple):
    """The programs between what is cached of frames and visual vectors."""

    encode: MeshProgram
    """`f(weights, bank) -> vectors`."""
    gradients: MeshProgram
    """`f(weights, bank, gradients of vectors) -> gradients of weights`, in float32."""


def make_vision_programs(
    vision: TrainedVision, mesh: Mesh, groups: int, room: int
) -> VisionPrograms:
    """Compile the trained part of the vision tower for the bank of a step.

    Args:
        vision: The trained part of the tower.
        mesh: The mesh of training.
        groups: Processes, each of which provides as many rows of the bank.
        room: Room for the visual vectors of a process.
    """
    whole = NamedSharding(mesh, PartitionSpec())

    def vision_vectors(weights: Any, bank: Bank) -> Array:
        vectors = vision.encode(weights, bank.cached, bank.grids, groups, room)
        return vectors.reshape(row_devices(mesh), -1, *vectors.shape[2:])

    def vision_gradients(weights: Any, bank: Bank, of_vectors: Array) -> Any:
        vectors, pull_back = jax.vjp(lambda weights: vision_vectors(weights, bank), weights)
        (grads,) = pull_back(over_replicas(of_vectors, mesh).astype(vectors.dtype))
        return grads

    return VisionPrograms(
        MeshProgram(jax.jit(vision_vectors, out_shardings=bank_sharding(mesh)), mesh),
        MeshProgram(jax.jit(vision_gradients, out_shardings=whole), mesh),
    )


class Updater:
    """Updates the trained weights of a model on the mesh where they are.

    With several replicas of the weights, gradients have a first axis of replicas, which `apply`
    adds up (`train.learn.placement`).

    Args:
        skeleton: The model without its trained weights.
        initial: The state before the first update, on a mesh: arrays, or only their shapes. Updates
            keep its shardings.
        optimizer: Turns gradients into changes of the weights.
        loss: The loss of a micro-batch.
        slots: Room per device for visual vectors. Only needed if a part of the tower is trained.
        accumulates: Whether a step may have several micro-batches, whose gradients are added up.

    Attributes:
        initial: The state before the first update.
        add: Adds the gradients of a micro-batch.
        apply: `f(state, gradients) -> (state, norm of the gradients)`. The state is donated.
        vision: The programs of the trained part of the tower; None: none is trained.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        initial: TrainState,
        optimizer: optax.GradientTransformation,
        loss: Loss,
        slots: int = 0,
        accumulates: bool = True,
    ):
        mesh = require_mesh(initial.weights)
        self.mesh = mesh
        self._accumulates = accumulates
        self.initial = initial
        self.add = _make_add(skeleton, loss, initial)
        self.apply = _make_apply(optimizer, initial)
        self.vision: VisionPrograms | None = None
        if skeleton.vision is not None:
            processes = len({device.process_index for device in mesh.devices.flat})
            room = slots * row_devices(mesh) // processes
            self.vision = make_vision_programs(skeleton.vision, mesh, processes, room)

    def visual(self, weights: Any, bank: Bank) -> Float[Array, "*m c d"]:
        """Return a step's visual vectors under some weights of the tower's trained part."""
        return bank.cached if self.vision is None else self.vision.encode(weights, bank)

    def gradients(
        self,
        weights: Any,
        bank: Bank,
        microbatches: Sequence[Microbatch],
        batch: Any,
    ) -> tuple[Any, MicrobatchMetrics]:
        """Return the gradients of a batch, and the metrics of every micro-batch.

        The tower runs once before all micro-batches, and back once after them, with the sum of the
        gradients of its vectors (as in GradCache, arXiv 2101.06983).

        Args:
            weights: The trained weights.
            bank: What is cached of the step's frames.
            microbatches: Packed rows.
            batch: What else the loss reads, of the whole batch.
        """
        text, vision = split_vision(weights)
        visual = self.visual(vision, bank)
        total: Any = None
        if self._accumulates:
            of = text if self.vision is None else (text, visual)
            total = zeros(sums_of(of, self.mesh))
        metrics: MicrobatchMetrics = {}
        for microbatch in microbatches:
            total, figures = self.add(text, total, visual, microbatch, batch)
            for name, value in figures.items():
                metrics.setdefault(name, []).append(value)
        if self.vision is None:
            return total, metrics
        of_text, of_visual = total
        return merge_vision(of_text, self.vision.gradients(vision, bank, of_visual)), metrics

    def lowerings(
        self,
        state: TrainState,
        bank: Bank,
        inputs: Sequence[tuple[Microbatch, Any]],
    ) -> Iterator[Lowering]:
        """Return the programs of an update, those that take long to compile first.

        Args:
            state: The current state.
            bank: The bank of any step.
            inputs: A micro-batch of every size, each with what else the loss reads.
        """
        text, vision = split_vision(state.weights)
        total = sums_of(text, self.mesh)
        sums, visual = total, bank.cached
        if self.vision is not None:
            visual = self.abstract_visual(vision, bank)
            of_visual = sums_of(visual, self.mesh)
            whole = NamedSharding(self.mesh, PartitionSpec())
            sums, total = (total, of_visual), merge_vision(total, like(vision, whole))
            yield functools.partial(self.vision.gradients.lower, vision, bank, of_visual)
            yield functools.partial(self.vision.encode.lower, vision, bank)
        for microbatch, batch in inputs:
            arguments = (text, sums if self._accumulates else None, visual, microbatch, batch)
            yield functools.partial(self.add.lower, *arguments)
        yield functools.partial(self.apply.lower, state, total)

    def abstract_visual(self, vision: Any, bank: Bank) -> Any:
        """Return the visual vectors of a step as abstract arrays."""
        if self.vision is None:
            return bank.cached
        return like(self.vision.encode.lower(vision, bank).out_info, bank_sharding(self.mesh))


def like(arrays: Any, shardings: Any) -> Any:
    """Return abstract arrays with these shardings: a tree of them, or one for all."""
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, arrays)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        arrays,
        shardings,
    )


def to_floats(metrics: MicrobatchMetrics) -> dict[str, float]:
    """Return the sums of metrics over micro-batches, or the maximum for `*_max`.

    Waits for the devices. Means of tags that do not occur are left out.
    """
    numbers = {
        name: (max if name.endswith("_max") else sum)(map(float, values))
        for name, values in metrics.items()
    }

    def empty(name: str) -> bool:
        group, _, figure = name.rpartition("/")
        return figure in ("probability", "logprob") and numbers[f"{group}/count"] == 0

    return {name: number for name, number in numbers.items() if not empty(name)}
