"""The jitted programs of training: log-probs of a batch, and updates of the trained weights.

Visual vectors come with the batch. If a part of the vision tower is trained, they are computed from
what is cached of frames (`models.trained_vision`): in an update of the cold start with the
loss; in RL before the first micro-batch, and their gradients are taken back after the last one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, UInt8

from models.lora import NOTHING, drops
from models.remat import Remat
from models.sharding import ROWS, MeshProgram, constrain, mesh_of, row_devices
from models.text import TextDecoder
from models.trained import apart, together
from models.trained_vision import TrainedVision
from train.learn.batch import Microbatch
from train.learn.placement import (
    Bank,
    bank_sharding,
    in_replicas,
    over_replicas,
    sums_shape,
    sums_sharding,
)


# Annotations are not checked, because JAX also builds this tree with shardings as leaves.
@no_type_check
@struct.dataclass
class TrainState:
    """The trained weights (`models.trained`) and the optimizer's state after `step` updates."""

    weights: Any
    optimizer: Any
    step: jax.Array


Loss = Callable[[TextDecoder, Any], tuple[Float[Array, ""], dict[str, Float[Array, ""]]]]
"""`f(decoder, batch) -> (loss, metrics)`."""


def init_state(weights: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first update, sharded as `state_shardings` says."""
    state = TrainState(weights, optimizer.init(weights), jnp.zeros((), jnp.int32))
    return jax.device_put(state, state_shardings(state))


def state_shardings(state: TrainState) -> TrainState:
    """The sharding of each array of a real or abstract state, following that of its weights.

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
        for start in range(len(path)):
            name = jax.tree_util.keystr(path[start:])
            if name in of_weights:
                return of_weights[name]
        return replicated

    return jax.tree_util.tree_map_with_path(find, state)


def _in_update(graph: nnx.GraphDef, weights: Any, frozen: Any, draw: Any) -> TextDecoder:
    """The decoder in an update, whose adapters drop inputs if they are to.

    Args:
        graph: The decoder without its weights.
        weights: Its trained weights.
        frozen: Its other weights.
        draw: Numbers that decide what is dropped, the first one a seed.
    """
    text: TextDecoder = nnx.merge(graph, weights, frozen)
    if drops(text):
        key = jax.random.key(draw[0])
        text.dropout_key = functools.reduce(jax.random.fold_in, draw[1:], key)
    return text


class Scores(NamedTuple):
    """What the trainer computes for the r rollouts of a step, of u tokens each."""

    logprobs: Float[Array, "r u"]
    """Log-prob of each token, given all tokens before it; 0 for a rollout's first token, which is
    the last one of its prompt, and for tokens that are not in this micro-batch."""
    routes: UInt8[Array, "r u l"] | None
    """Marks of the experts that computed each log-prob, by layer (`models.experts`), and anything
    where there is no log-prob; None without experts."""


def score_rollouts(
    text: TextDecoder,
    visual: Float[Array, "*m c d"],
    batch: Microbatch,
    temperature: float,
    remat: Remat = "none",
    chunk: int | None = None,
) -> Scores:
    """Score each token of the rollouts in a micro-batch.

    Args:
        text: The decoder.
        visual: The step's bank of visual vectors; its leading axes count slots.
        batch: Packed rows, and the places of the rollouts' tokens in them.
        temperature: The temperature at which the rollouts were sampled.
        remat: Activation checkpointing policy.
        chunk: Tokens per piece of a row whose logits exist at a time; None: all.
    """
    # Vectors come split by slot, but any token may need any slot. Split by their width instead:
    # every device then looks up its part of all vectors.
    bank = constrain(visual.reshape(1, -1, *visual.shape[-2:]), None, None, None, ROWS)
    hidden, _, marks = text.forward(
        batch.ids,
        batch.positions,
        segment_ids=batch.segments,
        starts=batch.starts,
        shared=batch.shared,
        visual=bank,
        visual_index=batch.visual_index,
        pieces=batch.pieces,
        remat=remat,
    )
    # The output at place i predicts the token at place i + 1, which may be in the next piece.
    # What follows a segment's last token is another segment's first: its log-prob is not used.
    following = jnp.roll(batch.ids.reshape(-1), -1).reshape(batch.ids.shape)
    predicted = text.token_logprobs(hidden, following, temperature, chunk).reshape(-1)
    places = jnp.maximum(batch.index - 1, 0)
    first = jnp.arange(batch.index.shape[1])[None] == 0
    logprobs = jnp.where((batch.index < 0) | first, 0.0, predicted[places])
    routes = None
    if marks is not None:
        # [l, b, t] -> [r, u, l]
        routes = jnp.moveaxis(marks.reshape(len(marks), -1)[:, places], 0, -1)
    return Scores(logprobs, routes)


def rollout_logprobs(
    text: TextDecoder,
    visual: Float[Array, "*m c d"],
    batch: Microbatch,
    temperature: float,
    remat: Remat = "none",
    chunk: int | None = None,
) -> Float[Array, "r u"]:
    """The log-probs of `score_rollouts`, which has the same arguments."""
    return score_rollouts(text, visual, batch, temperature, remat, chunk).logprobs


def make_logprobs(
    graph: nnx.GraphDef,
    temperature: float,
    mesh: Mesh,
    chunk: int | None = None,
    frozen: Any = NOTHING,
) -> MeshProgram:
    """Compile the log-probs of a micro-batch under given weights, without gradients.

    Args:
        graph: The decoder without its weights.
        temperature: See `score_rollouts`.
        mesh: The mesh of weights and batch.
        chunk: See `score_rollouts`.
        frozen: The decoder's weights that are not trained (`models.lora.split`).

    Returns:
        `f(weights, visual, Microbatch) -> float32[r, u]`.
    """

    def found(arrays: Any, _: None, batch: Any, number: Any) -> tuple[None, dict[str, jax.Array]]:
        frozen, weights, visual = arrays
        (rows,) = batch
        text = nnx.merge(graph, weights, frozen)
        return None, {"all": rollout_logprobs(text, visual, rows, temperature, chunk=chunk)}

    def logprobs(frozen: Any, weights: Any, visual: jax.Array, batch: Microbatch) -> jax.Array:
        # Added over replicas: a token is in one of them, and 0 in all others.
        return in_replicas(found, mesh)((frozen, weights, visual), None, (batch,))[1]["all"]

    jitted = jax.jit(logprobs, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return MeshProgram(jitted, mesh, (frozen,))


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
        (found,) = pull_back(over_replicas(of_vectors, mesh).astype(vectors.dtype))
        return found

    return VisionPrograms(
        MeshProgram(jax.jit(vision_vectors, out_shardings=bank_sharding(mesh)), mesh),
        MeshProgram(jax.jit(vision_gradients, out_shardings=whole), mesh),
    )


class Accumulation(NamedTuple):
    """The programs of an update whose micro-batches have several sizes.

    Gradients are added in float32, in the order of the micro-batches: bfloat16 would round small
    ones away, and a fixed order makes a resumed run equal an uninterrupted one bit for bit.
    """

    start: MeshProgram
    """`f(of) -> gradients`, all zero, of the decoder's trained weights; or of a pair of these and
    the visual vectors, if these are differentiated too."""
    add: MeshProgram
    """`f(weights, gradients, visual, *batch, draw=...) -> (gradients, metrics)`. The gradients are
    donated. `draw` decides what adapters drop: seed, update and micro-batch."""
    apply: MeshProgram
    """`f(state, gradients) -> (state, grad_norm)`. The state is donated."""


def make_accumulation(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    loss: Any,
    state: TrainState,
    frozen: Any = NOTHING,
) -> Accumulation:
    """Compile an update in micro-batches, one call for each.

    With several replicas of the weights, gradients have a first axis of replicas, which `apply`
    adds up (`train.learn.placement`).

    Args:
        graph: The decoder without its weights.
        optimizer: Turns gradients into changes of the weights.
        loss: `f(decoder, visual, *batch) -> (loss, metrics)` of a micro-batch. It divides by totals
            of the whole batch, so that losses, metrics and gradients of micro-batches add up.
        state: A real or abstract state, with the shardings that updates keep. If it has weights of
            the tower, visual vectors are differentiated.
        frozen: The decoder's weights that are not trained (`models.lora.split`).
    """
    mesh = mesh_of(state.weights)
    text, vision = apart(state.weights)
    placed = jax.tree.map(lambda x: sums_sharding(x.sharding, mesh), text)
    wanted: int | tuple[int, ...] = 0
    if vision is not None:
        assert mesh is not None, "a trained tower without a mesh"
        placed, wanted = (placed, sums_sharding(bank_sharding(mesh), mesh)), (0, 1)

    def zero_gradients(of: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(sums_shape(x.shape, mesh), jnp.float32), of)

    def added(arrays: Any, total: Any, batch: Any, number: Any) -> tuple[Any, dict[str, jax.Array]]:
        frozen, weights, visual, draw = arrays

        @jax.named_scope("forward")
        def value(weights: Any, visual: Array) -> Any:
            return loss(_in_update(graph, weights, frozen, (*draw, *number)), visual, *batch)

        found, grads = jax.value_and_grad(value, wanted, has_aux=True)(weights, visual)
        value_of_part, metrics = found
        total = jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, grads)
        return total, metrics | {"loss": value_of_part}

    # Not `add`: the log of compilations names functions, and jnp.add has that name.
    def add_gradients(
        frozen: Any, weights: Any, total: Any, visual: Array, *batch: Any, draw: Any = (0,)
    ) -> tuple[Any, dict[str, jax.Array]]:
        return in_replicas(added, mesh)((frozen, weights, visual, draw), total, batch)

    def apply_gradients(state: TrainState, total: Any) -> tuple[TrainState, jax.Array]:
        of_text, of_vision = apart(total)
        total = together(over_replicas(of_text, mesh), of_vision)
        grads = jax.tree.map(lambda g, w: g.astype(w.dtype), total, state.weights)
        return _optimized(optimizer, state, grads), optax.global_norm(grads)

    return Accumulation(
        MeshProgram(jax.jit(zero_gradients, out_shardings=placed), mesh),
        MeshProgram(
            jax.jit(add_gradients, donate_argnums=2, out_shardings=(placed, None)), mesh, (frozen,)
        ),
        MeshProgram(
            jax.jit(
                apply_gradients, donate_argnums=0, out_shardings=(state_shardings(state), None)
            ),
            mesh,
        ),
    )


@jax.named_scope("optimizer")
def _optimized(
    optimizer: optax.GradientTransformation, state: TrainState, grads: Any
) -> TrainState:
    """The state after a step of the optimizer."""
    changes, optimizer_state = optimizer.update(grads, state.optimizer, state.weights)
    weights = optax.apply_updates(state.weights, changes)
    return TrainState(weights, optimizer_state, state.step + 1)


def make_update(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    loss: Loss,
    state: TrainState,
    split: Callable[[Any], Any] | None = None,
    frozen: Any = NOTHING,
    seed: int = 0,
    encode: Callable[[Any, Any], Any] | None = None,
) -> MeshProgram:
    """Compile one update: gradients of the loss, then a step of the optimizer.

    Gradients are added over replicas of the weights once, after all micro-batches.

    Args:
        graph: The decoder without its weights.
        optimizer: Turns gradients into changes of the weights.
        loss: The loss of a batch. With `split`, it takes a micro-batch and divides by the totals of
            the whole batch, so that losses, metrics and gradients of micro-batches add up.
        state: A real or abstract state, with the shardings that updates keep.
        split: Splits a batch into micro-batches along a new first axis. Their gradients are
            accumulated in float32, in order.
        frozen: The decoder's weights that are not trained (`models.lora.split`).
        seed: With the number of the update, decides what adapters drop.
        encode: If a part of the tower is trained: `f(its weights, batch) -> batch` with visual
            vectors in place of what is cached of frames.

    Returns:
        `f(state, batch) -> (state, metrics)`. The state is donated. The metrics are the loss
        function's own, plus `loss` and `grad_norm`.
    """

    mesh = mesh_of(state.weights)
    placed = jax.tree.map(lambda x: sums_sharding(x.sharding, mesh), state.weights)

    def gradients(frozen: Any, state: TrainState, part: Any, *numbers: int | Array) -> Any:
        @jax.named_scope("forward")
        def value(weights: Any) -> Any:
            text, vision = apart(weights)
            shown = part if encode is None else encode(vision, part)
            return loss(_in_update(graph, text, frozen, (seed, state.step, *numbers)), shown)

        return jax.value_and_grad(value, has_aux=True)(state.weights)

    def accumulate(frozen: Any, state: TrainState, batch: Any, replica: Any) -> Any:
        if split is None:
            return gradients(frozen, state, batch, 0, *replica)
        parts = split(batch)

        def add(total: Any, part: Any) -> tuple[Any, None]:
            new = gradients(frozen, state, *part, *replica)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, new), None

        # A scan keeps one gradient in memory beside the total; a `map` would keep all of them.
        # Its fixed order of additions makes a resumed run equal an uninterrupted one bit for bit.
        first = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(gradients, frozen, state, first, 0, *replica)
        numbers = jnp.arange(len(jax.tree.leaves(parts)[0]))
        # The total is float32: bfloat16 would round small gradients of later parts away.
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
        (values, grads), _ = jax.lax.scan(add, zeros, (parts, numbers))
        return values, jax.tree.map(lambda g, w: g.astype(w.dtype), grads, state.weights)

    def found(arrays: Any, _: None, batch: Any, number: Any) -> tuple[Any, dict[str, jax.Array]]:
        frozen, state = arrays
        (rows,) = batch
        (value, metrics), grads = accumulate(frozen, state, rows, number)
        return grads, metrics | {"loss": value}

    def sft_update(
        frozen: Any, state: TrainState, batch: Any
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, metrics = in_replicas(found, mesh)((frozen, state), None, (batch,))
        grads = over_replicas(grads, mesh, placed)
        metrics = metrics | {"grad_norm": optax.global_norm(grads)}
        return _optimized(optimizer, state, grads), metrics

    # The new state keeps the shardings of the old one; otherwise the next update would compile
    # again. Donation lets XLA write the new state into the old one's memory.
    out_shardings = (state_shardings(state), None)
    jitted = jax.jit(sft_update, donate_argnums=1, out_shardings=out_shardings)
    return MeshProgram(jitted, mesh, (frozen,))
