"""Text from one prompt: the tower and the prompt in one compiled program, all new tokens in another.

Owns the buckets: prompts, patches and room for new tokens are padded to a few lengths, so that samples of about one size share their
programs. Refuses batches: those are `rollout.engine`'s. Invariant: the tokens are those of the whole forward pass; padding changes none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from models.attention import DenseCache
from models.qwen3_vl.config import VisionConfig
from models.qwen3_vl.model import Inputs, Qwen3VL
from models.qwen3_vl.rope import next_position
from models.qwen3_vl.text import KV, TextDecoder
from models.qwen3_vl.vision import PackedPatches, PatchLayout, deal_rows, pack_patches

_LEAST_ROW = 256  # visual tokens: smaller frames share a row


def generate(
    model: Qwen3VL,
    inputs: Inputs,
    *,
    new_tokens: int,
    stop_ids: Sequence[int],
    temperature: float = 0.0,
    seed: int = 0,
    bucket: int = 256,
) -> Int32[np.ndarray, " n"]:
    """Up to `new_tokens` ids that follow the prompt; the last one is the stop id where one came up.

    A temperature of 0 takes the likeliest, and `seed` then means nothing. Lengths are padded to multiples of `bucket` tokens, patches to
    powers of two; the first sample of a size compiles. ValueError for fewer than one token and for a temperature below 0.
    """
    if new_tokens < 1:
        raise ValueError(
            f"new_tokens = {new_tokens}: at least 1; give the most that the answer may have"
        )
    if not temperature >= 0:
        raise ValueError(f"temperature = {temperature}: 0 or above; use 0 for the likeliest tokens")
    packed = _pack_inputs(inputs, model.config.vision) if len(inputs.patches) else None
    # Where in the tower's rows each token finds its vector. At text the index is -1, and so is the entry that it takes.
    index = (
        inputs.visual_index if packed is None else np.append(packed.tokens, -1)[inputs.visual_index]
    )
    length, position = len(inputs.ids), next_position(inputs.positions)
    room = ((0, 0), (0, -length % bucket))
    ids, index = (
        np.pad(x[None], room, constant_values=fill).astype(np.int32)
        for x, fill in ((inputs.ids, 0), (index, -1))
    )
    positions = np.pad(inputs.positions, room)[:, None]
    seen = None if packed is None else (packed.patches, packed.layout)
    logits, kv = _prefill(*nnx.split(model), ids, positions, index, seen, np.int32(length))
    counts, stops = (
        np.array([length, position, new_tokens], np.int32),
        np.asarray(stop_ids, np.int32),
    )
    choice = stops, np.float32(temperature), jax.random.key(seed)
    found, count = _decode(
        *nnx.split(model.text), logits, kv, counts, *choice, most=new_tokens + -new_tokens % bucket
    )
    return np.asarray(found)[: int(count)]


def _pack_inputs(inputs: Inputs, config: VisionConfig) -> PackedPatches:
    """Rows that the largest frame fits into, both their size and their number rounded up to powers of two."""
    cell = config.spatial_merge_size**2
    size = cell * max(_LEAST_ROW, _power_of_two(max(h * w for _, h, w in inputs.grids) // cell))
    return pack_patches(
        inputs.patches,
        inputs.grids,
        size,
        config,
        _power_of_two(len(deal_rows(inputs.grids, size))),
    )


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@functools.partial(jax.jit, static_argnames="graph")
def _prefill(
    graph: nnx.GraphDef[Qwen3VL],
    weights: nnx.State,
    ids: Int[Array, "1 t"],
    positions: Int[Array, "3 1 t"],
    index: Int[Array, "1 t"],
    seen: tuple[Float[Array, "b p c"], PatchLayout] | None,
    length: Int[Array, ""],
) -> tuple[Float[Array, "1 v"], KV]:
    """Scores of the first new token, and the prompt's keys and values. Padding stands on the right, where no token sees it."""
    model = nnx.merge(graph, weights)
    visual = None
    if seen is not None:
        features = model.vision(*seen)
        visual = features.reshape(1, -1, *features.shape[2:])
    hidden, kv = model.text(
        ids, positions, visual=visual, visual_index=None if visual is None else index
    )
    return model.text.logits(hidden[:, length - 1]), kv


@functools.partial(jax.jit, static_argnames=("graph", "most"))
def _decode(
    graph: nnx.GraphDef[TextDecoder],
    weights: nnx.State,
    logits: Float[Array, "1 v"],
    kv: KV,
    counts: Int[Array, "3"],
    stops: Int[Array, " s"],
    temperature: Float[Array, ""],
    key: jax.Array,
    *,
    most: int,
) -> tuple[Int[Array, " most"], Int[Array, ""]]:
    """New ids, and how many of them there are. `counts`: the prompt's length, the position that follows it, and the limit of new tokens."""
    text = nnx.merge(graph, weights)
    length, position, limit = counts
    layers = text.decode_layers()
    prompt = DenseCache.prefilled(kv, jnp.arange(kv.k.shape[2])[None] < length, most)

    def pick(logits, number):
        # The largest of the scores with Gumbel noise is a draw from their softmax.
        noise = jax.random.gumbel(jax.random.fold_in(key, number), logits.shape)
        return jnp.argmax(logits + temperature * noise)

    def cond(state):
        count, ids, _ = state
        return (count < limit) & (ids[count - 1] != stops).all()

    def body(state):
        count, ids, cache = state
        at = count - 1
        hidden, cache = text.decode(ids[at, None], jnp.full((3, 1), position + at), cache, layers)
        return (
            count + 1,
            ids.at[count].set(pick(text.logits(hidden), count)),
            cache.advance(jnp.ones(1, bool)),
        )

    ids = jnp.zeros(most, jnp.int32).at[0].set(pick(logits, 0))
    count, ids, _ = jax.lax.while_loop(cond, body, (jnp.int32(1), ids, prompt))
    return ids, count
