"""Text from one prompt: a program for the frames of each size, and one for prompt and new tokens.

Prompts, visual vectors and the room for new tokens are padded to a few sizes, so that prompts of
similar length share a program. The padding changes no token. For batches use `rollout.engine`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from models.attention import DenseCache
from models.model import Inputs, VisionLanguageModel
from models.rope import next_position
from models.sharding import MeshProgram, mesh_of
from models.text import VisualBank
from models.vision import PatchLayout, frame_layout

# Lengths are padded to multiples of this, in tokens.
BUCKET = 256


def generate(
    model: VisionLanguageModel,
    inputs: Inputs,
    *,
    new_tokens: int,
    stop_ids: Sequence[int],
    temperature: float = 0.0,
    seed: int = 0,
) -> Int32[np.ndarray, " n"]:
    """Sample the tokens that follow a prompt.

    The first sample of a size compiles. A model whose weights are on a mesh runs on it.

    Args:
        model: the model.
        inputs: the prompt, from `models.processor.Processor`.
        new_tokens: upper bound on the tokens to generate.
        stop_ids: generation stops after one of these.
        temperature: sampling temperature; 0 takes the likeliest token.
        seed: seed of the sampling; unused at temperature 0.

    Returns:
        The new token ids, including the stop id if there was one.

    Raises:
        ValueError: `new_tokens` below 1 or a negative temperature.
    """
    if new_tokens < 1:
        raise ValueError(f"new_tokens = {new_tokens}: at least 1; give the longest allowed answer")
    if not temperature >= 0:
        raise ValueError(f"temperature = {temperature}: 0 or above; use 0 for the likeliest tokens")
    length = len(inputs.ids)
    padding = ((0, 0), (0, -length % BUCKET))
    prompt = _PaddedPrompt(
        np.pad(inputs.ids[None], padding),
        np.pad(inputs.positions, padding)[:, None],
        np.pad(inputs.visual_index[None], padding, constant_values=-1),
        np.int32(length),
        np.int32(next_position(inputs.positions)),
    )
    sampling = _Sampling(
        np.asarray(stop_ids, np.int32),
        np.float32(temperature),
        jax.random.key(seed),
        np.int32(new_tokens),
    )
    room = new_tokens + -new_tokens % BUCKET
    vectors = _visual_vectors(model, inputs) if inputs.grids else None
    sample = MeshProgram(_sample, mesh_of(nnx.state(model)))
    ids, count = sample(*nnx.split(model.text), prompt, vectors, sampling, room=room)
    return np.asarray(ids)[: int(count)]


class _PaddedPrompt(NamedTuple):
    """A prompt, padded on the right, where no token of the prompt sees the padding."""

    ids: Int[Array | np.ndarray, "1 t"]
    positions: Int[Array | np.ndarray, "3 1 t"]
    index: Int[Array | np.ndarray, "1 t"]
    """The visual vector of each token; -1 for text."""
    length: Int[Array | np.ndarray, ""] | np.int32
    """Tokens without padding."""
    next: Int[Array | np.ndarray, ""] | np.int32
    """The position of the first new token."""


class _Sampling(NamedTuple):
    """How new tokens are drawn, and what ends a response: an id, or the number of tokens."""

    stops: Int[Array | np.ndarray, " s"]
    temperature: Float[Array | np.ndarray, ""] | np.float32
    key: jax.Array
    limit: Int[Array | np.ndarray, ""] | np.int32


def _visual_vectors(model: VisionLanguageModel, inputs: Inputs) -> Float[np.ndarray, "1 m c d"]:
    """Return the visual vectors of all images and videos, padded with 0."""
    see = MeshProgram(_see, mesh_of(nnx.state(model)))
    ends = np.cumsum([math.prod(grid) for grid in inputs.grids])
    vectors = []
    for (t, h, w), patches in zip(inputs.grids, np.split(inputs.patches, ends[:-1]), strict=True):
        layout = frame_layout((h, w), model.config.vision)
        # As many frames as the next power of two, so that few programs are compiled.
        more = (1 << (t - 1).bit_length()) - t
        frames = np.pad(patches.reshape(t, h * w, -1), ((0, more), (0, 0), (0, 0)))
        seen = np.asarray(see(*nnx.split(model.vision), frames, layout))[:t]
        vectors.append(seen.reshape(-1, *seen.shape[2:]))
    joined = np.concatenate(vectors)
    return np.pad(joined, ((0, -len(joined) % BUCKET), (0, 0), (0, 0)))[None]


@functools.partial(jax.jit, static_argnames="graph")
def _see(
    graph: nnx.GraphDef, weights: nnx.State, patches: Float[Array, "t p c"], layout: PatchLayout
) -> Float[Array, "t q levels d"]:
    return nnx.merge(graph, weights)(patches, layout)


@functools.partial(jax.jit, static_argnames=("graph", "room"))
def _sample(
    graph: nnx.GraphDef,
    weights: nnx.State,
    prompt: _PaddedPrompt,
    vectors: Float[Array, "1 m c d"] | None,
    sampling: _Sampling,
    room: int,
) -> tuple[Int[Array, " room"], Int[Array, ""]]:
    """Return the new token ids and their number."""
    text = nnx.merge(graph, weights)
    visual = None if vectors is None else VisualBank(vectors, prompt.index)
    hidden, kv = text(prompt.ids, prompt.positions, visual=visual)
    valid = jnp.arange(prompt.ids.shape[1])[None] < prompt.length
    cache = DenseCache.prefilled(kv, valid, room)
    layers = text.decode_layers()

    def pick(hidden, number):
        # The Gumbel-max trick: scores plus Gumbel noise have their maximum at a draw from the
        # softmax.
        logits = text.logits(hidden)
        noise = jax.random.gumbel(jax.random.fold_in(sampling.key, number), logits.shape)
        return jnp.argmax(logits + sampling.temperature * noise)

    def unfinished(state):
        count, ids, _ = state
        return (count < sampling.limit) & (ids[count - 1] != sampling.stops).all()

    def body(state):
        count, ids, cache = state
        last = count - 1
        position = jnp.full((3, 1), prompt.next + last)
        hidden, cache, _ = text.decode(ids[last, None], position, cache, layers)
        ids = ids.at[count].set(pick(hidden, count))
        return count + 1, ids, cache.advance(jnp.ones(1, bool))

    ids = jnp.zeros(room, jnp.int32).at[0].set(pick(hidden[:, prompt.length - 1], 0))
    count, ids, _ = jax.lax.while_loop(unfinished, body, (jnp.int32(1), ids, cache))
    return ids, count
