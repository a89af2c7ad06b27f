"""The text decoder: embeddings, transformer layers, DeepStack and the vocabulary head.

`TextDecoder.__call__` runs whole sequences and `TextDecoder.extend` new tokens of cached ones, with
the same weights and the same layer. A token gets the same hidden state however its sequence is fed:
at once, in pieces, packed with other sequences, or token by token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.attention import PagedCache, RowLayout, attend, platform
from models.config import TextConfig, require
from models.experts import Experts
from models.layers import (
    LAYER_INPUT,
    PRODUCT,
    Remat,
    constant,
    normal,
    product,
    rematerialise,
    rms_norm,
)
from models.rope import mrope_angles, rotate
from models.sharding import BATCH, ROWS, constrain, current_mesh, on_devices, row_devices

# Up to this many hidden states, transposing the head costs more on CPU than the product itself.
_SMALL_BATCH = 64
# Mesh axes that shard the vocabulary while log-probs of many tokens are computed.
_VOCAB_AXES = ("fsdp", "tensor")


class KV(NamedTuple):
    """Keys (already rotated) and values of every layer."""

    k: Float[Array, "l b s k h"]
    v: Float[Array, "l b s k h"]


class VisualBank(NamedTuple):
    """Visual vectors of a batch, and the vector that each of its tokens takes.

    Every row has a bank of m vectors of its own, or all rows share one: n = 1. Level 0 of a vector
    replaces the token's embedding; level 1 + i is added after decoder layer i (DeepStack).
    """

    vectors: Float[Array | np.ndarray, "n m c d"]  # c = 1 + DeepStack levels
    index: Int[Array | np.ndarray, "b t"]  # into the m vectors; -1 where the token is text

    def embed(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Replace the embeddings of visual tokens."""
        return jnp.where(self.index[..., None] >= 0, self._at_tokens(0, x), x)

    def add_level(self, x: Float[Array, "b t d"], level: Int[Array, ""]) -> Float[Array, "b t d"]:
        """Add a DeepStack level to the hidden states of visual tokens, if there is that level."""
        levels = self.vectors.shape[2]
        if levels == 1:
            return x
        # A branch, not a mask: layers after the last level pay nothing, and the stack stays one
        # scan.
        return jax.lax.cond(level < levels, lambda x: x + self._at_tokens(level, x), lambda x: x, x)

    def _at_tokens(
        self, level: int | Int[Array, ""], like: Float[Array, "b t d"]
    ) -> Float[Array, "b t d"]:
        """Return one level's vectors at their tokens, 0 at text, in the type and shape of
        `like`."""
        bank = jax.lax.dynamic_index_in_dim(self.vectors, level, axis=2, keepdims=False)
        bank = bank.astype(like.dtype)
        indices = jnp.maximum(self.index, 0)
        if len(bank) == 1:
            vectors = _look_up(lambda bank, indices: bank[indices], bank[0], None, indices)
        else:
            vectors = _take_in_rows(bank, indices)
        return jnp.where(self.index[..., None] >= 0, vectors, 0)


def _take_in_rows(
    bank: Float[Array, "b m d"], indices: Int[Array | np.ndarray, "b t"]
) -> Float[Array, "b t d"]:
    """Return the vectors of each row's own bank."""

    def take(bank: Float[Array, "b m d"], indices: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        return jnp.take_along_axis(bank, indices[..., None], axis=1)

    mesh = current_mesh()
    if mesh is None or len(indices) % row_devices(mesh):
        return constrain(take(bank, jnp.asarray(indices)), ROWS)
    return on_devices(take, (BATCH, BATCH), BATCH)(bank, jnp.asarray(indices))


def _look_up(
    function: Callable[..., Array],
    table: Float[Array, "v d"],
    sharded: str | None,
    ids: Int[Array | np.ndarray, "b t"],
) -> Float[Array, "b t d"]:
    """Look up vectors of a table in each of its shares over the mesh. The result is sharded by row.

    Each device looks up its share of the width for all rows. The shares are exchanged for whole
    widths of some rows. The compiler would gather all rows on every device, and it aborts in a
    replica whose width and `tensor` are both sharded (XLA of jaxlib 0.10.2).

    Args:
        function: Looks up ids, given a share of the table.
        table: The table; its width is sharded over `fsdp`.
        sharded: Mesh axis over which its first axis is sharded, too.
        ids: What to look up.
    """
    mesh = current_mesh()
    if mesh is None:
        return function(table, jnp.asarray(ids))
    by_row = "data" if len(ids) % mesh.shape["data"] == 0 else None
    specs = (PartitionSpec(sharded, "fsdp"), PartitionSpec(by_row))
    shares = on_devices(function, specs, PartitionSpec(by_row, None, "fsdp"))
    return constrain(shares(table, jnp.asarray(ids)), ROWS)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and a gated MLP, or a mixture of experts.

    The parameters hold all layers, stacked along a leading axis. The methods work on a single
    layer: the module merged with one slice of those parameters.
    """

    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike):
        layers = config.num_hidden_layers
        d = config.hidden_size
        f = config.intermediate_size
        q = config.num_attention_heads
        k = config.num_key_value_heads
        h = config.head_dim

        def weight(shape: tuple[int, ...], axes: tuple[str, ...], inputs: int = 1) -> nnx.Param:
            # `inputs` is the number of axes that a product with the weight sums over.
            axes, std = ("layer", *axes), math.prod(shape[:inputs]) ** -0.5
            return normal(rngs, (layers, *shape), axes, std, param_dtype, inputs=inputs)

        def scale(size: int) -> nnx.Param:
            return constant(1.0, (layers, size), ("layer", "norm"), param_dtype)

        def bias(heads: int, axis: str) -> nnx.Param | None:
            if not config.attention_bias:
                return None
            return constant(0.0, (layers, heads, h), ("layer", axis, "head_dim"), param_dtype)

        self.eps = config.rms_norm_eps
        self.input_norm = scale(d)
        self.post_norm = scale(d)
        self.q_norm = scale(h) if config.qk_norm else None
        self.k_norm = scale(h) if config.qk_norm else None
        self.q = weight((d, q, h), ("embed", "heads", "head_dim"))
        self.k = weight((d, k, h), ("embed", "kv_heads", "head_dim"))
        self.v = weight((d, k, h), ("embed", "kv_heads", "head_dim"))
        self.q_bias = bias(q, "heads")
        self.k_bias = bias(k, "kv_heads")
        self.v_bias = bias(k, "kv_heads")
        self.o = weight((q, h, d), ("heads", "head_dim", "embed"), inputs=2)
        if config.experts is None:
            self.experts = None
            self.gate = weight((d, f), ("embed", "mlp"))
            self.up = weight((d, f), ("embed", "mlp"))
            self.down = weight((f, d), ("mlp", "embed"))
        else:
            self.experts = Experts(config, rngs=rngs, param_dtype=param_dtype)
        # Of some weights, by name (`models.lora`).
        self.adapters = nnx.Dict()

    @jax.named_scope("projections")
    def project(
        self, x: Float[Array, "b t d"], angles: Float[Array, "b t j"]
    ) -> tuple[Float[Array, "b t n h"], Float[Array, "b t k h"], Float[Array, "b t k h"]]:
        """Return queries, keys and values of x; queries and keys are rotated."""
        y = rms_norm(x, self.input_norm, self.eps)
        q = _plus(self._times("q", y), self.q_bias)
        k = _plus(self._times("k", y), self.k_bias)
        v = _plus(self._times("v", y), self.v_bias)
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(q, self.q_norm, self.eps)
            k = rms_norm(k, self.k_norm, self.eps)
        return rotate(q, angles), rotate(k, angles), v

    @jax.named_scope("mlp")
    def finish(
        self, x: Float[Array, "b t d"], attended: Float[Array, "b t n h"]
    ) -> Float[Array, "b t d"]:
        """Return the layer's output, given its input and the output of attention."""
        # The output projection takes all heads at once.
        x = x + self._times("o", attended.reshape(*x.shape[:-1], -1))
        y = rms_norm(x, self.post_norm, self.eps)
        if self.experts is not None:
            return x + self.experts(y)
        gate = jax.nn.silu(self._times("gate", y))
        return x + self._times("down", gate * self._times("up", y))

    def _times(self, name: str, x: Float[Array, "*n i"]) -> Float[Array, "*n *o"]:
        """Return x times a weight, plus what the weight's adapter adds."""
        weight = getattr(self, name)
        value = weight[...]
        # [n, h, d] -> [n * h, d]: the input axes as one.
        out = product(x, value.reshape(-1, *value.shape[weight.get_metadata("inputs") :]))
        if name in self.adapters:
            out = out + self.adapters[name](x)
        return checkpoint_name(out, PRODUCT)


def _plus(x: Float[Array, "b t n h"], bias: nnx.Param | None) -> Float[Array, "b t n h"]:
    if bias is None:
        return x
    return x + jax.lax.broadcast_to_rank(bias[...].astype(x.dtype), x.ndim)


LAYER_KINDS = {"full_attention": DecoderLayer}
"""Kinds of decoder layers, by their name in `layer_types` of config.json. Each keeps `KV` of the
tokens of a sequence."""


def layer_kind(config: TextConfig) -> type[DecoderLayer]:
    """Return the kind of a decoder's layers, which are one stack.

    Raises:
        ValueError: The pattern has an unknown kind, or several kinds.
    """
    kinds = set(config.layer_types)
    shown = ", ".join(sorted(kinds))[:80] or "none"
    require(
        len(kinds) == 1 and kinds <= LAYER_KINDS.keys(),
        f"text.layer_types: {shown}: unknown, or several kinds; give a model whose layers are all "
        f"{' or all '.join(LAYER_KINDS)}",
    )
    return LAYER_KINDS[kinds.pop()]


class TextDecoder(nnx.Module):
    """The decoder and its vocabulary head.

    Activations are in `dtype`. Logits and log-probs are float32: bfloat16 would round a logit of 20
    to a multiple of 0.125.
    """

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
        shape = (config.vocab_size, config.hidden_size)
        axes = ("vocab", "embed")
        self.embedding = normal(rngs, shape, axes, 0.02, param_dtype)
        self.layers = layer_kind(config)(config, rngs=rngs, param_dtype=param_dtype)
        self.norm = constant(1.0, (config.hidden_size,), ("norm",), param_dtype)
        if config.tie_word_embeddings:
            self.head = None
        else:
            self.head = normal(rngs, shape, axes, 0.02, param_dtype)

    def __call__(
        self,
        ids: Int[Array | np.ndarray, "b t"],
        positions: Int[Array | np.ndarray, "3 b t"],
        layout: RowLayout | None = None,
        visual: VisualBank | None = None,
        remat: Remat = "none",
    ) -> tuple[Float[Array, "b t d"], KV]:
        """Run the decoder over whole sequences.

        Over a mesh, rows are sharded over `data` and `fsdp`.

        Args:
            ids: token ids.
            positions: time, height and width of every token (`rope.mrope_positions`).
            layout: what each token sees; None: itself and earlier tokens of its row.
            visual: visual vectors and the tokens that take them; None: all tokens are text.
            remat: what is kept for the backward pass.

        Returns:
            Hidden states after the final norm, and the keys and values of these tokens.

        Raises:
            ValueError: the layout contradicts itself.
        """
        graph, state = nnx.split(self.layers)
        angles = mrope_angles(positions, self.config)
        # Hidden states kept between layers are sharded over `tensor` too. Inside a layer, the
        # devices of `tensor` share a row's products and need the whole row. Both ends of a layer
        # state both shardings: otherwise the compiler shards the products like the kept states, and
        # communicates several times as much.
        between = (ROWS,) if remat == "none" else (ROWS, "tensor")

        def body(x, layer):
            params, number = layer
            block = nnx.merge(graph, params)
            # The name marks what a policy keeps, so it goes on the sharded copy.
            x = checkpoint_name(constrain(x, *between), LAYER_INPUT)
            x = constrain(x, ROWS)
            q, k, v = block.project(x, angles)
            x = block.finish(x, attend(q, k, v, layout))
            if visual is not None:
                x = visual.add_level(x, number + 1)
            return constrain(constrain(x, ROWS), *between), KV(k, v)

        x = self._embed_rows(ids)
        if visual is not None:
            x = visual.embed(x)
        layers = jnp.arange(self.config.num_hidden_layers)
        x, kv = jax.lax.scan(rematerialise(body, remat), constrain(x, *between), (state, layers))
        return rms_norm(x, self.norm, self.config.rms_norm_eps), kv

    def extend(
        self,
        ids: Int[Array | np.ndarray, " n"],
        positions: Int[Array | np.ndarray, "3 n"],
        cache: PagedCache,
        visual: VisualBank | None = None,
        layers: Sequence[nnx.State] | None = None,
    ) -> tuple[Float[Array, "n d"], PagedCache]:
        """Run the decoder over new tokens of cached sequences.

        The cache is updated in place if the caller donates it.

        Args:
            ids: the tokens of the cache's jobs, joined.
            positions: time, height and width of every token.
            cache: keys and values of the tokens before them, and where the new ones go.
            visual: visual vectors, and the tokens that take them, as one row; None: all are text.
            layers: the result of `separate_layers`, called before a loop over calls. It saves a
                copy of the weights per call.

        Returns:
            Hidden states after the final norm, and the cache with the tokens written to it.
        """
        graph, state = nnx.split(self.layers)
        angles = mrope_angles(positions[:, None], self.config)

        # The cache is the carry of the scan. As an output, it would be copied in every call.
        def body(carry, layer):
            x, cache = carry
            number, params = layer
            block = nnx.merge(graph, params)
            q, k, v = block.project(x, angles)
            with jax.named_scope("attention"):
                attended, cache = cache.attend(number, q[0], k[0], v[0])
            x = block.finish(x, attended[None])
            if visual is not None:
                x = visual.add_level(x, number + 1)
            return (x, cache), None

        x = self.embed(ids)[None]
        if visual is not None:
            x = visual.embed(x)
        carry = (x, cache)
        if layers is None:
            numbers = jnp.arange(self.config.num_hidden_layers)
            carry, _ = jax.lax.scan(body, carry, (numbers, state))
        else:
            for layer in enumerate(layers):
                carry, _ = body(carry, layer)
        x, cache = carry
        return rms_norm(x, self.norm, self.config.rms_norm_eps)[0], cache

    def separate_layers(self) -> list[nnx.State] | None:
        """Return each layer's weights as separate arrays; None on TPU.

        Elsewhere a slice of the stacked weights is a copy, which `extend` would make in every call.
        """
        if platform() == "tpu":
            return None
        state = nnx.state(self.layers)
        return [
            jax.tree.map(lambda x, n=number: x[n], state)
            for number in range(self.config.num_hidden_layers)
        ]

    def embed(self, ids: Int[Array | np.ndarray, "*n"]) -> Float[Array, "*n d"]:
        """Return token embeddings."""
        return jnp.take(self.embedding[...], ids, axis=0).astype(self.dtype)

    def _embed_rows(self, ids: Int[Array | np.ndarray, "b t"]) -> Float[Array, "b t d"]:
        """Return token embeddings, with rows sharded over the mesh."""
        if current_mesh() is None:
            return self.embed(ids)

        def share(table: Float[Array, "v d"], ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
            """Return the embeddings of tokens in this device's share of the vocabulary; 0 of
            others."""
            own = ids - jax.lax.axis_index("tensor") * len(table)
            here = (own >= 0) & (own < len(table))
            vectors = table[jnp.clip(own, 0, len(table) - 1)].astype(self.dtype)
            return jax.lax.psum(jnp.where(here[..., None], vectors, 0), "tensor")

        return _look_up(share, self.embedding[...], "tensor", ids)

    def logits(self, hidden: Float[Array, "*n d"]) -> Float[Array, "*n v"]:
        """Return vocabulary scores, float32."""
        return _logits(self._head_weights(), hidden)

    def token_logprobs(
        self,
        hidden: Float[Array, "b t d"],
        targets: Int[Array | np.ndarray, "b t"],
        temperature: float,
        chunk: int | None = None,
    ) -> Float[Array, "b t"]:
        """Return the log-probs of `targets` under softmax(logits / temperature), float32.

        Args:
            hidden: hidden[b, t] is the state that predicts targets[b, t].
            targets: token ids.
            temperature: above 0.
            chunk: positions of each row to compute at a time; None computes all at once. The
                backward pass computes a chunk's logits again, so the logits of all tokens are never
                in memory together.
        """
        b, t = targets.shape
        # Sharded here, outside the loop: inside it, the head would move once per chunk.
        head = constrain(self._head_weights(), _VOCAB_AXES)
        if chunk is None or chunk >= t:
            return _chunk_logprobs(head, hidden, targets, temperature)
        padding = -t % chunk
        hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
        targets = jnp.pad(targets, ((0, 0), (0, padding)))
        # [b, t, ...] -> [chunks, b, chunk, ...], since lax.map runs over the leading axis.
        hidden = hidden.reshape(b, -1, chunk, hidden.shape[-1]).swapaxes(0, 1)
        targets = targets.reshape(b, -1, chunk).swapaxes(0, 1)
        one_chunk = jax.checkpoint(
            lambda x: _chunk_logprobs(head, x[0], x[1], temperature), prevent_cse=False
        )
        logprobs = jax.lax.map(one_chunk, (hidden, targets))
        return logprobs.swapaxes(0, 1).reshape(b, -1)[:, :t]

    def _head_weights(self) -> Float[Array, "v d"]:
        return (self.embedding if self.head is None else self.head)[...]


@jax.named_scope("logits")
def _logits(head: Float[Array, "v d"], hidden: Float[Array, "*n d"]) -> Float[Array, "*n v"]:
    head = head.astype(hidden.dtype)
    # All states along one axis, for the same reason as in `layers.product`.
    states = hidden.reshape(-1, hidden.shape[-1])
    if len(states) <= _SMALL_BATCH and platform() == "cpu":
        scores = jnp.einsum("vd,nd->vn", head, states, preferred_element_type=jnp.float32)
        # Without the barrier XLA merges the transpose into the product, and transposes the head.
        logits = jax.lax.optimization_barrier(scores).T
    else:
        logits = jnp.einsum("nd,vd->nv", states, head, preferred_element_type=jnp.float32)
    return logits.reshape(*hidden.shape[:-1], -1)


def _chunk_logprobs(
    head: Float[Array, "v d"],
    hidden: Float[Array, "b t d"],
    targets: Int[Array | np.ndarray, "b t"],
    temperature: float,
) -> Float[Array, "b t"]:
    # Over a mesh, each device scores the rows of its `data` slice against its part of the
    # vocabulary. That moves hidden states, which are smaller than the head's weights.
    hidden = constrain(constrain(hidden, ROWS), "data")
    logits = constrain(_logits(head, hidden), "data", None, _VOCAB_AXES) / temperature
    # A masked sum, not a gather: its gradient needs no scatter, and a sharded vocabulary stays
    # sharded.
    vocabulary = jnp.arange(logits.shape[-1])[None, None, :]
    is_target = vocabulary == targets[..., None]
    target_logit = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return target_logit - jax.nn.logsumexp(logits, axis=-1)
