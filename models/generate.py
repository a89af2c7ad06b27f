"""The likeliest text after one prompt. To sample, or for many prompts, use `rollout.engine`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from models.attention import DenseCache
from models.model import Inputs, VisionLanguageModel
from models.sharding import MeshProgram, mesh_of
from models.text import VisualBank
from models.vision import PatchLayout, frame_layout


def generate(
    model: VisionLanguageModel, inputs: Inputs, *, new_tokens: int, stop_ids: Sequence[int]
) -> Int32[np.ndarray, " n"]:
    """Return the likeliest tokens after a prompt, one at a time.

    A model whose weights are on a mesh runs on it. Every length of a prompt compiles a program.

    Args:
        model: the model.
        inputs: the prompt, from `models.processor.Processor`.
        new_tokens: upper bound on the tokens to generate.
        stop_ids: generation stops after one of these, which is the last token returned.

    Raises:
        ValueError: `new_tokens` is below 1.
    """
    if new_tokens < 1:
        raise ValueError(f"new_tokens = {new_tokens}: at least 1; give the longest allowed answer")
    mesh = mesh_of(nnx.state(model))
    visual = None
    if inputs.grids:
        see, weights = MeshProgram(_see, mesh), nnx.split(model.vision)
        ends = np.cumsum([math.prod(grid) for grid in inputs.grids])
        images = zip(np.split(inputs.patches, ends[:-1]), inputs.grids, strict=True)
        vision = model.config.vision
        vectors = [see(*weights, x[None], frame_layout(grid, vision)) for x, grid in images]
        visual = VisualBank(jnp.concatenate(vectors, axis=1), inputs.visual_index[None])
    prompt = inputs.ids[None], inputs.positions[:, None], visual
    sample = MeshProgram(_sample, mesh)
    stops = np.asarray(stop_ids, np.int32)
    ids, count = sample(*nnx.split(model.text), prompt, stops, new_tokens=new_tokens)
    return np.asarray(ids)[: int(count)]


@functools.partial(jax.jit, static_argnames="graph")
def _see(
    graph: nnx.GraphDef, weights: nnx.State, patches: Float[Array, "1 p c"], layout: PatchLayout
) -> Float[Array, "1 q levels d"]:
    return nnx.merge(graph, weights)(patches, layout)


@functools.partial(jax.jit, static_argnames=("graph", "new_tokens"))
def _sample(
    graph: nnx.GraphDef,
    weights: nnx.State,
    prompt: tuple[Int[Array, "1 t"], Int[Array, "3 1 t"], VisualBank | None],
    stops: Int[Array, " s"],
    new_tokens: int,
) -> tuple[Int[Array, " new_tokens"], Int[Array, ""]]:
    """Return the new token ids and their number.

    The prompt is its ids, positions and visual vectors.
    """
    ids, positions, visual = prompt
    text = nnx.merge(graph, weights)
    hidden, kv = text(ids, positions, visual=visual)
    cache = DenseCache.prefilled(kv, jnp.ones(ids.shape, bool), new_tokens)
    layers = text.decode_layers()
    after = positions.max() + 1

    def unfinished(state):
        count, new, _ = state
        return (count < new_tokens) & (new[count - 1] != stops).all()

    def body(state):
        count, new, cache = state
        position = jnp.full((3, 1), after + count - 1)
        hidden, cache = text.decode(new[count - 1, None], position, cache, layers)
        new = new.at[count].set(text.logits(hidden)[0].argmax())
        return count + 1, new, cache.advance(jnp.ones(1, bool))

    first = text.logits(hidden[:, -1])[0].argmax()
    new = jnp.zeros(new_tokens, jnp.int32).at[0].set(first)
    count, new, _ = jax.lax.while_loop(unfinished, body, (jnp.int32(1), new, cache))
    return new, count
