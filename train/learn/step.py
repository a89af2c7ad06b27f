"""The jitted programs of training: log-probs of a batch, and one update of the text decoder from a loss.

Owns how a batch runs through the model: the groups' prompts once, then every row attending to its prompt; and that every program runs
under the mesh its weights lie on. The vision tower is frozen; its vectors come with the batch. Refuses nothing: shapes were checked when
the batch was built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

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
from train.learn.placement import cut, pieces


@struct.dataclass
class TrainState:
    """The decoder's weights and the optimiser's state after `step` updates."""

    weights: Any
    optimizer: Any
    step: jax.Array


Loss = Callable[[TextDecoder, Any], tuple[Float[Array, ""], dict[str, Float[Array, ""]]]]


class MeshProgram(NamedTuple):
    """A jitted function that runs, and is lowered, with its mesh set."""

    jitted: Any
    mesh: Mesh | None

    def __call__(self, *arguments: Any) -> Any:
        with self._set():
            return self.jitted(*arguments)

    def lower(self, *arguments: Any) -> Any:
        """`jax.jit(...).lower`, for arrays or their abstract shapes."""
        with self._set():
            return self.jitted.lower(*arguments)

    def _set(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


def mesh_of(weights: Any) -> Mesh | None:
    """The mesh that weights (real or abstract) lie on; None where they were not laid on one."""
    place = jax.tree.leaves(weights)[0].sharding
    return place.mesh if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh) else None


def init_state(weights: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first update, laid over the weights' mesh: moments like their weight, the rest whole on every device."""
    state = TrainState(weights, optimizer.init(weights), jnp.zeros((), jnp.int32))
    return jax.device_put(state, state_shardings(state))


def state_shardings(state: TrainState) -> TrainState:
    """Where each array of a state lies (real or abstract), from where its weights do."""
    places = {
        jax.tree_util.keystr(path): leaf.sharding
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.weights)
    }
    mesh = mesh_of(state.weights)
    whole = next(iter(places.values())) if mesh is None else NamedSharding(mesh, PartitionSpec())

    def place(path: tuple[Any, ...], _: Any) -> Any:
        ends = (jax.tree_util.keystr(path[start:]) for start in range(len(path)))
        return next((places[end] for end in ends if end in places), whole)

    return jax.tree_util.tree_map_with_path(place, state)


def row_logprobs(
    text: TextDecoder,
    batch: Sequences,
    image_token_id: int,
    temperature: float,
    remat: Remat = "none",
    chunk: int | None = None,
) -> Float[Array, "b t"]:
    """Log-prob of each token of the rows given all before it, at `temperature`; 0 for a row's first token, the last one of its prompt."""
    x = jax.tree.map(jnp.asarray, batch)
    p, s = x.prompt_ids.shape
    many = pieces(p, len(x.ids), s)
    ids, segments, index = (
        y.reshape(p * many, -1)
        for y in (x.prompt_ids, x.prompt_segments, visual_index(x.prompt_ids, image_token_id))
    )
    positions = x.prompt_positions.reshape(3, p * many, -1)
    _, prompts = text(
        ids,
        positions,
        segment_ids=segments,
        visual=x.visual,
        visual_index=index,
        pieces=many,
        remat=remat,
    )
    hidden, _ = text(
        x.ids,
        x.positions,
        segment_ids=x.segments,
        prefix=prompts,
        prefix_mask=segments > 0,
        pieces=many,
        remat=remat,
    )
    logprobs = text.token_logprobs(hidden[:, :-1], x.ids[:, 1:], temperature, chunk)
    return jnp.pad(logprobs, ((0, 0), (1, 0)))


def make_logprobs(
    graph: nnx.GraphDef,
    image_token_id: int,
    temperature: float,
    chunk: int | None = None,
    mesh: Mesh | None = None,
    parts: int = 1,
) -> MeshProgram:
    """The jitted log-probs of a batch under given weights, in `parts` micro-batches: `f(weights, batch) -> float32[b, t]`."""

    def reference_logprobs(weights: Any, batch: Sequences) -> jax.Array:
        def of_part(part: Sequences) -> jax.Array:
            return row_logprobs(
                nnx.merge(graph, weights), part, image_token_id, temperature, chunk=chunk
            )

        return (
            of_part(batch)
            if parts == 1
            else jax.lax.map(of_part, cut(batch, parts)).reshape(batch.ids.shape)
        )

    return MeshProgram(jax.jit(reference_logprobs), mesh)


def make_update(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    loss: Loss,
    state: TrainState,
    split: Callable[[Any], Any] | None = None,
) -> MeshProgram:
    """The jitted, donated update `f(state, batch) -> (state, metrics)`: metrics are the loss's, `loss` and `grad_norm`.

    `state` (real or abstract) shows how the state lies on the mesh; what comes out lies the same way, so that nothing is compiled twice.
    `split` cuts a batch into micro-batches along a first axis; losses, metrics and gradients (in float32) are then computed one part after
    the other and added up.
    """

    def gradients(weights: Any, batch: Any) -> Any:
        return jax.value_and_grad(lambda w: loss(nnx.merge(graph, w), batch), has_aux=True)(weights)

    def accumulate(weights: Any, batch: Any) -> Any:
        if split is None:
            return gradients(weights, batch)
        parts = split(batch)

        def add(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(
                lambda a, b: a + b.astype(a.dtype), total, gradients(weights, part)
            ), None

        first = jax.tree.map(lambda x: x[0], parts)
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.float32), jax.eval_shape(gradients, weights, first)
        )
        (values, grads), _ = jax.lax.scan(add, zeros, parts)
        return values, jax.tree.map(lambda g, w: g.astype(w.dtype), grads, weights)

    def update(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        (value, metrics), grads = accumulate(state.weights, batch)
        changes, optimizer_state = optimizer.update(grads, state.optimizer, state.weights)
        weights = optax.apply_updates(state.weights, changes)
        metrics = metrics | {"loss": value, "grad_norm": optax.global_norm(grads)}
        return TrainState(weights, optimizer_state, state.step + 1), metrics

    places = state_shardings(state)
    return MeshProgram(
        jax.jit(update, donate_argnums=0, out_shardings=(places, None)), mesh_of(state.weights)
    )
