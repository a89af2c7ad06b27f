"""The jitted programs of training: log-probs of a batch, and one update of the text decoder.

The vision tower is frozen. Its vectors come with the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from models.qwen3_vl.remat import Remat
from models.qwen3_vl.rope import visual_index
from models.qwen3_vl.text import TextDecoder
from train.learn.batch import Sequences
from train.learn.placement import prompt_pieces, split_microbatches


# Annotations are not checked, because JAX also builds this tree with shardings as leaves.
@no_type_check
@struct.dataclass
class TrainState:
    """The decoder's weights and the optimizer's state after `step` updates."""

    weights: Any
    optimizer: Any
    step: jax.Array


Loss = Callable[[TextDecoder, Any], tuple[Float[Array, ""], dict[str, Float[Array, ""]]]]
"""`f(decoder, batch) -> (loss, metrics)`."""


class MeshProgram(NamedTuple):
    """A jitted function that sets its mesh when it is called or lowered."""

    jitted: Any
    mesh: Mesh | None

    def __call__(self, *arguments: Any) -> Any:
        with self._set():
            return self.jitted(*arguments)

    def lower(self, *arguments: Any) -> Any:
        """Like `jax.jit(...).lower`, for arrays or their abstract shapes."""
        with self._set():
            return self.jitted.lower(*arguments)

    def _set(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


def mesh_of(weights: Any) -> Mesh | None:
    """The mesh of real or abstract weights; None if they are not sharded over a mesh."""
    sharding = jax.tree.leaves(weights)[0].sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    return None


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


def row_logprobs(
    text: TextDecoder,
    batch: Sequences,
    image_token_id: int,
    temperature: float,
    remat: Remat = "none",
    chunk: int | None = None,
) -> Float[Array, "b t"]:
    """Log-prob of each token of the rows, given all tokens before it.

    Args:
        text: The decoder.
        batch: p prompts of s tokens, and b rows of t tokens.
        image_token_id: Id of the placeholder tokens that visual vectors replace.
        temperature: The temperature at which the rows were sampled.
        remat: Activation checkpointing policy.
        chunk: Tokens whose logits exist at a time; None: all.

    Returns:
        Log-probs by row; 0 for a row's first token.
    """
    x = jax.tree.map(jnp.asarray, batch)
    p, s = x.prompt_ids.shape
    # [p, s] -> [p * pieces, s / pieces]: every piece becomes a row, so that the devices that share
    # a prompt compute one piece each. In the decoder, a piece attends to the pieces before it.
    pieces = prompt_pieces(p, len(x.ids), s)
    index = visual_index(x.prompt_ids, image_token_id)
    prompt_ids = x.prompt_ids.reshape(p * pieces, -1)
    prompt_segments = x.prompt_segments.reshape(p * pieces, -1)
    # Gradients flow through the prompt's keys and values: its tokens are not scored, but they are
    # computed with the weights that are trained.
    _, prompts = text(
        prompt_ids,
        x.prompt_positions.reshape(3, p * pieces, -1),
        segment_ids=prompt_segments,
        visual=x.visual,
        visual_index=index.reshape(p * pieces, -1),
        pieces=pieces,
        remat=remat,
    )
    # Each row attends to the keys and values of its prompt, and to itself.
    hidden, _ = text(
        x.ids,
        x.positions,
        segment_ids=x.segments,
        prefix=prompts,
        prefix_mask=prompt_segments > 0,
        pieces=pieces,
        remat=remat,
    )
    # The output at t - 1 predicts token t.
    logprobs = text.token_logprobs(hidden[:, :-1], x.ids[:, 1:], temperature, chunk)
    # A row's first token is the last one of its prompt: nothing predicts it, so it gets 0.
    return jnp.pad(logprobs, ((0, 0), (1, 0)))


def make_logprobs(
    graph: nnx.GraphDef,
    image_token_id: int,
    temperature: float,
    chunk: int | None = None,
    mesh: Mesh | None = None,
    parts: int = 1,
) -> MeshProgram:
    """Compile the log-probs of a batch under given weights, without gradients.

    Args:
        graph: The decoder without its weights.
        image_token_id: See `row_logprobs`.
        temperature: See `row_logprobs`.
        chunk: See `row_logprobs`.
        mesh: The mesh of weights and batch.
        parts: Number of micro-batches, computed one after the other.

    Returns:
        `f(weights, Sequences) -> float32[b, t]`.
    """

    def reference_logprobs(weights: Any, batch: Sequences) -> jax.Array:
        def of_part(part: Sequences) -> jax.Array:
            text = nnx.merge(graph, weights)
            return row_logprobs(text, part, image_token_id, temperature, chunk=chunk)

        if parts == 1:
            return of_part(batch)
        # `map` computes one micro-batch at a time, which bounds the memory.
        logprobs = jax.lax.map(of_part, split_microbatches(batch, parts))
        return logprobs.reshape(batch.ids.shape)

    return MeshProgram(jax.jit(reference_logprobs), mesh)


def make_update(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    loss: Loss,
    state: TrainState,
    split: Callable[[Any], Any] | None = None,
) -> MeshProgram:
    """Compile one update: gradients of the loss, then a step of the optimizer.

    Args:
        graph: The decoder without its weights.
        optimizer: Turns gradients into changes of the weights.
        loss: The loss of a batch. With `split`, it takes a micro-batch and divides by the totals of
            the whole batch, so that losses, metrics and gradients of micro-batches add up.
        state: A real or abstract state, with the shardings that updates keep.
        split: Splits a batch into micro-batches along a new first axis. Their gradients are
            accumulated in float32, in order.

    Returns:
        `f(state, batch) -> (state, metrics)`. The state is donated. The metrics are the loss
        function's own, plus `loss` and `grad_norm`.
    """

    def gradients(weights: Any, batch: Any) -> Any:
        return jax.value_and_grad(lambda w: loss(nnx.merge(graph, w), batch), has_aux=True)(weights)

    def accumulate(weights: Any, batch: Any) -> Any:
        if split is None:
            return gradients(weights, batch)
        parts = split(batch)

        def add(total: Any, part: Any) -> tuple[Any, None]:
            new = gradients(weights, part)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, new), None

        # A scan keeps one gradient in memory beside the total; a `map` would keep all of them.
        # Its fixed order of additions makes a resumed run equal an uninterrupted one bit for bit.
        first = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(gradients, weights, first)
        # The total is float32: bfloat16 would round small gradients of later parts away.
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
        (values, grads), _ = jax.lax.scan(add, zeros, parts)
        return values, jax.tree.map(lambda g, w: g.astype(w.dtype), grads, weights)

    def update(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        (value, metrics), grads = accumulate(state.weights, batch)
        changes, optimizer_state = optimizer.update(grads, state.optimizer, state.weights)
        weights = optax.apply_updates(state.weights, changes)
        metrics = metrics | {"loss": value, "grad_norm": optax.global_norm(grads)}
        return TrainState(weights, optimizer_state, state.step + 1), metrics

    # The new state keeps the shardings of the old one; otherwise the next update would compile
    # again. Donation lets XLA write the new state into the old one's memory.
    out_shardings = (state_shardings(state), None)
    jitted = jax.jit(update, donate_argnums=0, out_shardings=out_shardings)
    return MeshProgram(jitted, mesh_of(state.weights))
