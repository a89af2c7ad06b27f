"""Text from one prompt: one compiled program for the tower and the prompt, one for all new tokens.

Prompts, patches and the room for new tokens are padded to a few sizes, so that samples of similar
size share their programs. The padding changes no token. For batches use `rollout.engine`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from models.attention import DenseCache
from models.config import VisionConfig
from models.model import Inputs, VisionLanguageModel
from models.packing import PackedPatches, deal_rows, pack_patches
from models.rope import next_position
from models.sharding import MeshProgram, mesh_of
from models.text import KV, TextDecoder, VisualBank
from models.vision import PatchLayout

# Lengths are padded to multiples of this, in tokens.
BUCKET = 256
# Smallest row of the tower, in visual tokens. Smaller frames share a row.
_MIN_ROW = 256


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
    index = inputs.visual_index
    seen = None
    if len(inputs.patches):
        packed = _pack_inputs(inputs, model.config.vision)
        seen = (packed.patches, packed.layout)
        # From the token's number in the sample to its place in the tower's rows. Text has index -1,
        # which reads the appended -1.
        index = np.append(packed.tokens, -1)[index]
    length = len(inputs.ids)
    padding = ((0, 0), (0, -length % BUCKET))
    ids = np.pad(inputs.ids[None], padding).astype(np.int32)
    index = np.pad(index[None], padding, constant_values=-1).astype(np.int32)
    positions = np.pad(inputs.positions, padding)[:, None]
    mesh = mesh_of(nnx.state(model))
    prefill, decode = MeshProgram(_prefill, mesh), MeshProgram(_decode, mesh)
    prompt = _Prompt(ids, positions, index, seen, np.int32(length))
    logits, kv = prefill(*nnx.split(model), prompt)
    counts = np.array([length, next_position(inputs.positions), new_tokens], np.int32)
    sampling = _Sampling(
        np.asarray(stop_ids, np.int32), np.float32(temperature), jax.random.key(seed)
    )
    room = new_tokens + -new_tokens % BUCKET
    found, count = decode(*nnx.split(model.text), (logits, kv), counts, sampling, room=room)
    return np.asarray(found)[: int(count)]


def _pack_inputs(inputs: Inputs, config: VisionConfig) -> PackedPatches:
    """Pack the frames into rows; size and number of rows are rounded up to powers of two."""
    merged = config.spatial_merge_size**2
    largest = max(h * w for _, h, w in inputs.grids) // merged
    size = merged * max(_MIN_ROW, _power_of_two(largest))
    rows = _power_of_two(len(deal_rows(inputs.grids, size)))
    return pack_patches(inputs.patches, inputs.grids, size, config, rows)


def _power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


class _Prompt(NamedTuple):
    """A prompt, padded on the right, where no token of the prompt sees the padding."""

    ids: Int[Array | np.ndarray, "1 t"]
    positions: Int[Array | np.ndarray, "3 1 t"]
    index: Int[Array | np.ndarray, "1 t"]
    """Each token's place in the tower's rows; -1 for text."""
    seen: tuple[Float[Array | np.ndarray, "b p c"], PatchLayout] | None
    """Patches of the frames, and their layout; None without frames."""
    length: Int[Array | np.ndarray, ""] | np.int32
    """Tokens without padding."""


class _Sampling(NamedTuple):
    """How new tokens are drawn, and the ids that end a response."""

    stops: Int[Array | np.ndarray, " s"]
    temperature: Float[Array | np.ndarray, ""] | np.float32
    key: jax.Array


@functools.partial(jax.jit, static_argnames="graph")
def _prefill(
    graph: nnx.GraphDef[VisionLanguageModel], weights: nnx.State, prompt: _Prompt
) -> tuple[Float[Array, "1 v"], KV]:
    """Return the scores of the first new token, and the prompt's keys and values."""
    model = nnx.merge(graph, weights)
    ids, positions, index, seen, length = prompt
    visual = None
    if seen is not None:
        # [b, q, levels, d] -> [1, b * q, levels, d]: one bank for the one sequence.
        features = model.vision(*seen)
        visual = VisualBank(features.reshape(1, -1, *features.shape[2:]), index)
    hidden, kv = model.text(ids, positions, visual=visual)
    return model.text.logits(hidden[:, length - 1]), kv


@functools.partial(jax.jit, static_argnames=("graph", "room"))
def _decode(
    graph: nnx.GraphDef[TextDecoder],
    weights: nnx.State,
    prefilled: tuple[Float[Array, "1 v"], KV],
    counts: Int[Array, "3"],
    sampling: _Sampling,
    room: int,
) -> tuple[Int[Array, " room"], Int[Array, ""]]:
    """Return the new token ids and their number.

    `prefilled` is the result of `_prefill`. `counts` holds the prompt's length, the position after
    it, and the limit of new tokens.
    """
    text = nnx.merge(graph, weights)
    logits, kv = prefilled
    stops, temperature, key = sampling
    length, position, limit = counts
    layers = text.decode_layers()
    prompt = DenseCache.prefilled(kv, jnp.arange(kv.k.shape[2])[None] < length, room)

    def pick(logits, number):
        # The Gumbel-max trick: scores plus Gumbel noise have their maximum at a draw from the
        # softmax.
        noise = jax.random.gumbel(jax.random.fold_in(key, number), logits.shape)
        return jnp.argmax(logits + temperature * noise)

    def cond(state):
        count, ids, _ = state
        return (count < limit) & (ids[count - 1] != stops).all()

    def body(state):
        count, ids, cache = state
        last = count - 1
        last_position = jnp.full((3, 1), position + last)
        hidden, cache, _ = text.decode(ids[last, None], last_position, cache, layers)
        ids = ids.at[count].set(pick(text.logits(hidden), count))
        return count + 1, ids, cache.advance(jnp.ones(1, bool))

    ids = jnp.zeros(room, jnp.int32).at[0].set(pick(logits, 0))
    count, ids, _ = jax.lax.while_loop(cond, body, (jnp.int32(1), ids, prompt))
    return ids, count
