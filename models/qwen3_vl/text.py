"""The decoder: token ids, positions and visual vectors in; hidden states, keys and values out; and log-probs from hidden states.

Owns the embedding, the layers (one stack, scanned), DeepStack's entry into the first of them, one-token decoding and the
vocabulary head. Refuses visual vectors without their index; shapes are static and checked while tracing. Invariant: however the
tokens are cut - at once, suffixes over a shared prefix, packed, or one by one - they get the same hidden states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from models.attention import DenseCache, PagedCache, attend, platform
from models.qwen3_vl.config import TextConfig
from models.qwen3_vl.layers import constant, normal, product, rms_norm
from models.qwen3_vl.remat import LAYER_INPUT, Remat, rematerialise
from models.qwen3_vl.rope import mrope_angles, rotate
from models.sharding import ROWS, constrain

Cache = TypeVar("Cache", DenseCache, PagedCache)

# For so few rows CPU spends more time on turning the head around than on the product: there the head comes first.
_FEW_ROWS = 64
_WORDS = (
    "fsdp",
    "tensor",
)  # mesh axes that cut the vocabulary where log-probs of many tokens are computed


class KV(NamedTuple):
    """Keys (rotated) and values of every layer."""

    k: Float[Array, "l b s k h"]
    v: Float[Array, "l b s k h"]


class DecoderLayer(nnx.Module):
    """Pre-norm attention and gated MLP; made with a leading layer axis, used with one layer's slice of it."""

    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike):
        c = config
        n, d, f, q, k, h = (
            c.num_hidden_layers,
            c.hidden_size,
            c.intermediate_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
        )

        def weight(shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int) -> nnx.Param:
            return normal(rngs, (n, *shape), ("layer", *axes), fan_in**-0.5, param_dtype)

        def scale(size: int) -> nnx.Param:
            return constant(1.0, (n, size), ("layer", "norm"), param_dtype)

        self.eps = c.rms_norm_eps
        self.input_norm, self.post_norm, self.q_norm, self.k_norm = (
            scale(d),
            scale(d),
            scale(h),
            scale(h),
        )
        self.q = weight((d, q, h), ("embed", "heads", "head_dim"), d)
        self.k = weight((d, k, h), ("embed", "kv_heads", "head_dim"), d)
        self.v = weight((d, k, h), ("embed", "kv_heads", "head_dim"), d)
        self.o = weight((q, h, d), ("heads", "head_dim", "embed"), q * h)
        self.gate = weight((d, f), ("embed", "mlp"), d)
        self.up = weight((d, f), ("embed", "mlp"), d)
        self.down = weight((f, d), ("mlp", "embed"), f)

    def project(
        self, x: Float[Array, "b t d"], angles: Float[Array, "b t j"]
    ) -> tuple[Float[Array, "b t n h"], Float[Array, "b t k h"], Float[Array, "b t k h"]]:
        """Queries, keys and values of x, heads normed and turned."""
        y = rms_norm(x, self.input_norm, self.eps)
        q, k, v = (product(y, w[...]) for w in (self.q, self.k, self.v))
        return (
            rotate(rms_norm(q, self.q_norm, self.eps), angles),
            rotate(rms_norm(k, self.k_norm, self.eps), angles),
            v,
        )

    def finish(
        self, x: Float[Array, "b t d"], attended: Float[Array, "b t n h"]
    ) -> Float[Array, "b t d"]:
        """The layer's output from its input and what its heads attended to."""
        out = self.o[...]
        x = x + product(attended.reshape(*x.shape[:-1], -1), out.reshape(-1, out.shape[-1]))
        y = rms_norm(x, self.post_norm, self.eps)
        return x + product(
            jax.nn.silu(product(y, self.gate[...])) * product(y, self.up[...]), self.down[...]
        )


class TextDecoder(nnx.Module):
    """The decoder and its vocabulary head. Activations in `dtype`, logits and log-probs in float32."""

    def __init__(
        self,
        config: TextConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
    ):
        self.config = config
        self.dtype = dtype
        shape, axes = (config.vocab_size, config.hidden_size), ("vocab", "embed")
        self.embedding = normal(rngs, shape, axes, 0.02, param_dtype)
        self.layers = DecoderLayer(config, rngs=rngs, param_dtype=param_dtype)
        self.norm = constant(1.0, (config.hidden_size,), ("norm",), param_dtype)
        self.head = (
            None if config.tie_word_embeddings else normal(rngs, shape, axes, 0.02, param_dtype)
        )

    def __call__(
        self,
        ids: Int[Array, "b t"],
        positions: Int[Array, "3 b t"],
        *,
        segment_ids: Int[Array, "b t"] | None = None,
        visual: Float[Array, "b m c d"] | None = None,
        visual_index: Int[Array, "b t"] | None = None,
        prefix: KV | Callable[[Int[Array, ""]], KV] | None = None,
        prefix_mask: Bool[Array, "p s"] | None = None,
        pieces: int = 1,
        remat: Remat = "none",
    ) -> tuple[Float[Array, "b t d"], KV]:
        """Hidden states after the final norm, and the keys and values of these tokens.

        Tokens attend causally within equal `segment_ids` (0 = padding; None = one segment). `visual` is each sequence's bank of m
        visual vectors, c = 1 + DeepStack levels; `visual_index` points into it, -1 where a token is text. `prefix` holds
        p = b / g prompts: rows r * g ... r * g + g - 1 also attend to row r of it where `prefix_mask` holds, and are one segment
        each; it may be a function that reads the prompts of one layer, by its number, where all layers at once are too much. `pieces`: so
        many rows of the prefix (without one: of these tokens) are one sequence. `remat` says what the backward pass finds saved
        (`remat.Remat`). Over the mesh that is set, rows lie over data and fsdp, and what is saved of them over tensor too. ValueError
        where `visual` and `visual_index` are not given together.
        """
        if (visual is None) != (visual_index is None):
            raise ValueError(
                "visual, visual_index: given together or not at all; pass both, or neither for text"
            )
        graph, state = nnx.split(self.layers)
        angles = mrope_angles(positions, self.config)
        # What is saved between layers is cut over `tensor` too; within a layer its devices share a row's products, and have it whole.
        # That is said at both ends: else the compiler takes the cut into the products, and sends several times as much.
        between = (ROWS,) if remat == "none" else (ROWS, "tensor")

        def body(x, layer):
            params, number, kept = layer
            past = prefix(number) if callable(prefix) else kept
            block, x = (
                nnx.merge(graph, params),
                checkpoint_name(constrain(x, *between), LAYER_INPUT),
            )
            x = constrain(x, ROWS)
            q, k, v = block.project(x, angles)
            x = block.finish(
                x,
                attend(
                    q,
                    k,
                    v,
                    segment_ids=segment_ids,
                    prefix=past,
                    prefix_mask=prefix_mask,
                    pieces=pieces,
                ),
            )
            if visual is not None and visual_index is not None and visual.shape[2] > 1:
                # A branch, not a mask: layers after the last DeepStack level pay nothing, and the stack stays one scan.
                spread = functools.partial(_spread, visual, visual_index, number + 1)
                x = jax.lax.cond(
                    number + 1 < visual.shape[2], lambda x: x + spread(x), lambda x: x, x
                )
            return constrain(constrain(x, ROWS), *between), KV(k, v)

        # From words whose vectors are cut to rows that are whole in one exchange; in one step the compiler would gather all rows.
        x = constrain(constrain(self.embed(constrain(ids, "data")), "data", None, "fsdp"), ROWS)
        if visual is not None and visual_index is not None:
            x = jnp.where(visual_index[..., None] >= 0, _spread(visual, visual_index, 0, x), x)
        layers = jnp.arange(self.config.num_hidden_layers)
        x, kv = jax.lax.scan(
            rematerialise(body, remat),
            constrain(x, *between),
            (state, layers, None if callable(prefix) else prefix),
        )
        return rms_norm(x, self.norm, self.config.rms_norm_eps), kv

    def decode(
        self,
        ids: Int[Array, " b"],
        positions: Int[Array, "3 b"],
        cache: Cache,
        layers: Sequence[nnx.State] | None = None,
    ) -> tuple[Float[Array, "b d"], Cache]:
        """One text token a row: the hidden state after the final norm, and the cache with the token in it, not yet advanced.

        The cache is updated in place where the caller donates it. `layers`: what `decode_layers` gave, taken before a loop over tokens.
        """
        graph, state = nnx.split(self.layers)
        angles = mrope_angles(positions[..., None], self.config)

        # The cache is carried, not scanned over: as a scan's output it would be copied whole for every token.
        def body(carry, layer):
            x, cache = carry
            number, params = layer
            block = nnx.merge(graph, params)
            q, k, v = block.project(x, angles)
            attended, cache = cache.attend(number, q[:, 0], k[:, 0], v[:, 0])
            return (block.finish(x, attended[:, None]), cache), None

        carry = self.embed(ids)[:, None], cache
        if cache.stacked:
            carry, _ = jax.lax.scan(body, carry, (jnp.arange(self.config.num_hidden_layers), state))
        else:
            for layer in enumerate(layers or self._unstacked(state)):
                carry, _ = body(carry, layer)
        x, cache = carry
        return rms_norm(x, self.norm, self.config.rms_norm_eps)[:, 0], cache

    def decode_layers(self) -> list[nnx.State] | None:
        """Each layer's weights as arrays of their own on CPU, where they would be copied out of the stack at every token; else None."""
        if platform() != "cpu":
            return None
        return self._unstacked(nnx.state(self.layers))

    def _unstacked(self, state: nnx.State) -> list[nnx.State]:
        return [
            jax.tree.map(lambda x, n=number: x[n], state)
            for number in range(self.config.num_hidden_layers)
        ]

    def embed(self, ids: Int[Array, "*n"]) -> Float[Array, "*n d"]:
        """Token embeddings."""
        return jnp.take(self.embedding[...], ids, axis=0).astype(self.dtype)

    def logits(self, hidden: Float[Array, "*n d"]) -> Float[Array, "*n v"]:
        """Scores of every word, float32."""
        return _logits((self.embedding if self.head is None else self.head)[...], hidden)

    def token_logprobs(
        self,
        hidden: Float[Array, "b t d"],
        targets: Int[Array, "b t"],
        temperature: float,
        chunk: int | None = None,
    ) -> Float[Array, "b t"]:
        """Log-prob of `targets` under softmax(logits / temperature), float32; hidden[b, t] is the state that predicts targets[b, t].

        `chunk` positions of every row at a time (None: all at once), computed again in the backward pass, so that
        [tokens, vocab] is never whole.
        """
        b, t = targets.shape
        # Laid out here: inside the loop over chunks the head would move once a chunk.
        head = constrain((self.embedding if self.head is None else self.head)[...], _WORDS)
        if chunk is None or chunk >= t:
            return _chunk_logprobs(head, hidden, targets, temperature)
        rest = -t % chunk
        hidden = (
            jnp.pad(hidden, ((0, 0), (0, rest), (0, 0)))
            .reshape(b, -1, chunk, hidden.shape[-1])
            .swapaxes(0, 1)
        )
        targets = jnp.pad(targets, ((0, 0), (0, rest))).reshape(b, -1, chunk).swapaxes(0, 1)
        one = jax.checkpoint(
            lambda x: _chunk_logprobs(head, x[0], x[1], temperature), prevent_cse=False
        )
        return jax.lax.map(one, (hidden, targets)).swapaxes(0, 1).reshape(b, -1)[:, :t]


def _logits(head: Float[Array, "v d"], hidden: Float[Array, "*n d"]) -> Float[Array, "*n v"]:
    head = head.astype(hidden.dtype)
    rows = hidden.reshape(-1, hidden.shape[-1])  # one axis, as in `product`
    if len(rows) <= _FEW_ROWS and platform() == "cpu":
        words = jnp.einsum("vd,nd->vn", head, rows, preferred_element_type=jnp.float32)
        logits = jax.lax.optimization_barrier(
            words
        ).T  # without the barrier XLA turns the product around again
    else:
        logits = jnp.einsum("nd,vd->nv", rows, head, preferred_element_type=jnp.float32)
    return logits.reshape(*hidden.shape[:-1], -1)


def _chunk_logprobs(
    head: Float[Array, "v d"],
    hidden: Float[Array, "b t d"],
    targets: Int[Array, "b t"],
    temperature: float,
) -> Float[Array, "b t"]:
    """Over a mesh each device has all rows of its part of the words: hidden states move, which are fewer than the head's weights."""
    hidden = constrain(constrain(hidden, ROWS), "data")
    logits = constrain(_logits(head, hidden), "data", None, _WORDS) / temperature
    # A masked sum, not a gather: its gradient needs no scatter, and a vocabulary that is cut over devices stays cut.
    own = jnp.sum(
        jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0.0), axis=-1
    )
    return own - jax.nn.logsumexp(logits, axis=-1)


def _spread(
    visual: Float[Array, "b m c d"],
    index: Int[Array, "b t"],
    level: int | Int[Array, ""],
    like: Float[Array, "b t d"],
) -> Float[Array, "b t d"]:
    """One level's visual vectors at the tokens they stand for, 0 at text; in the type of `like`. A bank serves a sequence: one row, or
    its pieces."""
    bank = jax.lax.dynamic_index_in_dim(visual, level, axis=2, keepdims=False).astype(like.dtype)
    places = jnp.maximum(index, 0).reshape(len(bank), -1, 1)
    vectors = jnp.take_along_axis(bank, places, axis=1).reshape(like.shape)
    return jnp.where(index[..., None] >= 0, constrain(vectors, ROWS), 0)
