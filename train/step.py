"""The jitted programs of training: log-probs of a batch, and one update of the text decoder from a loss.

Owns how a batch runs through the model: the groups' prompts once, then every row attending to its prompt. The vision tower
is frozen; its vectors come with the batch. Refuses nothing: shapes were checked when the batch was built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from models.qwen3_vl.rope import visual_index
from models.qwen3_vl.text import TextDecoder
from train.batch import Sequences


@struct.dataclass
class TrainState:
    """The decoder's weights and the optimiser's state after `step` updates."""

    weights: Any
    optimizer: Any
    step: jax.Array


Loss = Callable[[TextDecoder, Any], tuple[Float[Array, ""], dict[str, Float[Array, ""]]]]
Update = Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]


def init_state(weights: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first update, laid over the weights' mesh: moments like their weight, the rest whole on every device."""
    places = {jax.tree_util.keystr(path): leaf.sharding for path, leaf in jax.tree_util.tree_leaves_with_path(weights)}
    whole = NamedSharding(next(iter(places.values())).mesh, PartitionSpec())

    def place(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        ends = (jax.tree_util.keystr(path[start:]) for start in range(len(path)))
        return jax.device_put(leaf, next((places[end] for end in ends if end in places), whole))

    state = TrainState(weights, optimizer.init(weights), jnp.zeros((), jnp.int32))
    return jax.tree_util.tree_map_with_path(place, state)


def row_logprobs(
    text: TextDecoder, batch: Sequences, image_token_id: int, temperature: float, remat: bool = False, chunk: int | None = None
) -> Float[Array, "b t"]:
    """Log-prob of each token of the rows given all before it, at `temperature`; 0 for a row's first token, the last one of its prompt."""
    x = jax.tree.map(jnp.asarray, batch)
    index = visual_index(x.prompt_ids, image_token_id)
    _, prompts = text(x.prompt_ids, x.prompt_positions, segment_ids=x.prompt_segments, visual=x.visual, visual_index=index, remat=remat)
    hidden, _ = text(x.ids, x.positions, segment_ids=x.segments, prefix=prompts, prefix_mask=x.prompt_segments > 0, remat=remat)
    logprobs = text.token_logprobs(hidden[:, :-1], x.ids[:, 1:], temperature, chunk)
    return jnp.pad(logprobs, ((0, 0), (1, 0)))


def make_logprobs(
    graph: nnx.GraphDef, image_token_id: int, temperature: float, chunk: int | None = None
) -> Callable[[Any, Sequences], jax.Array]:
    """The jitted log-probs of a batch under given weights: `f(weights, batch) -> float32[b, t]`."""

    @jax.jit
    def reference_logprobs(weights: Any, batch: Sequences) -> jax.Array:
        return row_logprobs(nnx.merge(graph, weights), batch, image_token_id, temperature, chunk=chunk)

    return reference_logprobs


def make_update(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    loss: Loss,
    state: TrainState,
    split: Callable[[Any], Any] | None = None,
) -> Update:
    """The jitted, donated update `f(state, batch) -> (state, metrics)`: metrics are the loss's, `loss` and `grad_norm`.

    `state` shows how the state lies on the mesh; what comes out lies the same way, so that nothing is compiled twice. `split` cuts a
    batch into micro-batches along a first axis; losses, metrics and gradients (in float32) are then computed one part after the other
    and added up.
    """

    def gradients(weights: Any, batch: Any) -> Any:
        return jax.value_and_grad(lambda w: loss(nnx.merge(graph, w), batch), has_aux=True)(weights)

    def accumulate(weights: Any, batch: Any) -> Any:
        if split is None:
            return gradients(weights, batch)
        parts = split(batch)

        def add(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, gradients(weights, part)), None

        first = jax.tree.map(lambda x: x[0], parts)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), jax.eval_shape(gradients, weights, first))
        (values, grads), _ = jax.lax.scan(add, zeros, parts)
        return values, jax.tree.map(lambda g, w: g.astype(w.dtype), grads, weights)

    def update(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        (value, metrics), grads = accumulate(state.weights, batch)
        changes, optimizer_state = optimizer.update(grads, state.optimizer, state.weights)
        weights = optax.apply_updates(state.weights, changes)
        metrics = metrics | {"loss": value, "grad_norm": optax.global_norm(grads)}
        return TrainState(weights, optimizer_state, state.step + 1), metrics

    return jax.jit(update, donate_argnums=0, out_shardings=(jax.tree.map(lambda x: x.sharding, state), None))
