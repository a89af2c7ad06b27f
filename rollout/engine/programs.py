"""The engine's compiled programs: prefill, decoding, and copies of pages.

The KV cache is one array, the pool: a fixed number of pages for all layers
(`models.attention.PagedCache`).

The pool takes most of the device's memory, so two of them would not fit. Every program therefore
takes the pool donated and returns it: XLA writes into the same buffer. The caller's old reference
is dead afterwards.

All shapes come from `EngineSizes`, so once each program has been compiled, nothing compiles again.
The lengths of sequences are not among them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from models.attention import PagedCache, SharedPages
from models.lora import split
from models.model import VisionLanguageModel
from models.sharding import MeshProgram, mesh_of, zeros
from models.text import TextDecoder, VisualBank
from rollout.engine.drafts import accepted, propose
from rollout.engine.sampling import Choices, sample

Pool = Float[Array, "l pages kv k u h"]
# Visual vectors of one call of prefill, those of all its jobs; c = 1 + DeepStack levels.
Bank = Float[Array, "bank c d"]
MOST_STOP_IDS = 64  # per row: the width of an array that every program takes


class Pieces(NamedTuple):
    """Tokens to prefill: j jobs of t consecutive tokens of a sequence.

    Attributes:
        ids: token ids.
        positions: M-RoPE positions.
        index: the vector of each visual token in the bank, -1 for text.
        offsets: where each token is in its sequence, -1 for padding.
        tables: the pages of the job's sequence.
    """

    ids: Int[Any, "j t"]
    positions: Int[Any, "3 j t"]
    index: Int[Any, "j t"]
    offsets: Int[Any, "j t"]
    tables: Int[Any, "j m"]


class DecodeRows(NamedTuple):
    """What to decode: one row per sequence.

    A row attends to the tokens on its group's shared pages, if it has a part in them, then to those
    on the pages of its own table.

    Attributes:
        tokens: the last token of each row, the input of the first step.
        positions: the position of that token.
        offsets: its offset on the row's own pages.
        tables: these pages, and those that new tokens are written to.
        shared: the pages that each group reads together.
        shared_tokens: tokens that the row sees on them.
        drawn: tokens sampled so far; the number of the next draw.
        left: tokens it may still sample, 0 in an idle row.
        stops: ids that end the row, padded with -1.
        choices: how its tokens are sampled.
        history: what drafts are taken from (`drafts.propose`); None in a program without drafts.
        lengths: entries of `history` that are used. The last is the row's last token.
    """

    tokens: Int[Any, " b"]
    positions: Int[Any, " b"]
    offsets: Int[Any, " b"]
    tables: Int[Any, "b m"]
    shared: Int[Any, "g m"]
    shared_tokens: Int[Any, " b"]
    drawn: Int[Any, " b"]
    left: Int[Any, " b"]
    stops: Int[Any, "b n"]
    choices: Choices
    history: Int[Any, "b s"] | None
    lengths: Int[Any, " b"]


class Drawn(NamedTuple):
    """New tokens: the first `counts` of each row, of at most n."""

    ids: Int[Any, "b n"]
    logprobs: Float[Any, "b n"]
    counts: Int[Any, " b"]


class _State(NamedTuple):
    """The carry of the loop over steps. Everything else about a row follows from `counts`."""

    step: Int[Array, ""]
    active: Bool[Array, " b"]
    counts: Int[Array, " b"]
    tokens: Int[Array, " b"]
    history: Int[Array, "b s"] | None
    pages: Pool
    ids: Int[Array, "b n"]
    logprobs: Float[Array, "b n"]


class Programs:
    """The jitted functions for one model.

    With every call they take the text decoder's weights: the trained and the frozen ones.

    Args:
        model: gives structure, type and sharding of the weights.
        page: tokens per page.

    Attributes:
        platform: that of the devices: "cpu", "gpu" or "tpu".
    """

    def __init__(self, model: VisionLanguageModel, page: int):
        self.page = page
        self.text = model.config.text
        self.dtype = model.text.dtype
        self._graph, *weights = split(model.text)
        pool_sharding = result_sharding = jax.tree.leaves(weights)[0].sharding
        self.platform = next(iter(result_sharding.device_set)).platform
        mesh = mesh_of(weights)
        if mesh is not None:
            tensor, heads = mesh.shape["tensor"], self.text.num_key_value_heads
            if heads % tensor:
                raise ValueError(
                    f"tensor = {tensor}: it must divide the {heads} kv heads of a model that "
                    f"samples; give its mesh a divisor of {self.text.most_tensor}"
                )
            # Keys and values are sharded like the weights that compute them: by heads over
            # `tensor`. Results are replicated.
            pool_sharding = NamedSharding(mesh, PartitionSpec(None, None, None, "tensor"))
            result_sharding = NamedSharding(mesh, PartitionSpec())
        self._pool_sharding = pool_sharding
        self._bank_sharding = result_sharding
        self._vectors = (1 + model.config.vision.levels, self.text.hidden_size)

        prefill = jax.jit(self._prefill, donate_argnums=1, out_shardings=pool_sharding)
        copy = jax.jit(self._copy, donate_argnums=0, out_shardings=pool_sharding)
        decode = jax.jit(
            self._decode,
            static_argnames=("steps", "drafts"),
            donate_argnums=1,
            out_shardings=(pool_sharding, result_sharding),
        )
        # On a mesh, the kernels look it up.
        self.prefill = MeshProgram(prefill, mesh)
        self.copy = MeshProgram(copy, mesh)
        self.decode = MeshProgram(decode, mesh)

    def abstract_pool(self, pages: int) -> jax.ShapeDtypeStruct:
        """Return the shape, type and sharding of `make_pool`, to compile programs before it takes
        memory."""
        heads, head_dim = self.text.num_key_value_heads, self.text.head_dim
        shape = (self.text.num_hidden_layers, pages, 2, heads, self.page, head_dim)
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=self._pool_sharding)

    def make_pool(self, pages: int) -> Pool:
        """Return a pool of `pages` pages filled with zeros."""
        return zeros(self.abstract_pool(pages))

    def abstract_bank(self, tokens: int) -> jax.ShapeDtypeStruct:
        """Return the shape, type and sharding of a bank of `tokens` visual vectors."""
        shape = (tokens, *self._vectors)
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=self._bank_sharding)

    def _prefill(self, weights: Any, pool: Pool, bank: Bank, pieces: Pieces) -> Pool:
        """Compute the tokens of `pieces` and write their keys and values to their pages."""
        text: TextDecoder = nnx.merge(self._graph, *weights)
        visual = VisualBank(bank[None], pieces.index.reshape(1, -1))
        cache = PagedCache(pool, pieces.tables, pieces.offsets)
        ids, positions = pieces.ids.reshape(-1), pieces.positions.reshape(3, -1)
        _, cache = text.extend(ids, positions, cache, visual)
        return cache.pages

    def _copy(
        self,
        pool: Pool,
        sources: Int[Array, " n"],
        targets: Int[Array, " n"],
        count: Int[Array, ""],
    ) -> Pool:
        """Copy the first `count` pages of `sources`, one after the other."""

        def copy_one(n: Int[Array, ""], pool: Pool) -> Pool:
            page = jax.lax.dynamic_index_in_dim(pool, sources[n], axis=1)
            return jax.lax.dynamic_update_index_in_dim(pool, page, targets[n], axis=1)

        return jax.lax.fori_loop(0, count, copy_one, pool)

    def _decode(
        self, weights: Any, pool: Pool, rows: DecodeRows, *, steps: int, drafts: int
    ) -> tuple[Pool, Drawn]:
        """Sample tokens for every row in up to `steps` steps. Ends early when no row is active.

        A step feeds each row its last token and `drafts` guesses of the tokens after it, and draws
        a token behind each of them. A token depends on the row's seed and its number only. So as
        long as the guesses are what was drawn, the tokens drawn behind them are what single steps
        would have drawn, up to rounding.
        """
        text: TextDecoder = nnx.merge(self._graph, *weights)
        layers = text.separate_layers()
        ahead = jnp.arange(1 + drafts)[None]
        each = jnp.arange(len(rows.tokens))[:, None]

        def unfinished(state: _State) -> Bool[Array, ""]:
            return (state.step < steps) & state.active.any()

        def body(state: _State) -> _State:
            tokens = state.tokens[:, None]
            if state.history is not None:
                guesses = propose(state.history, rows.lengths + state.counts, drafts)
                tokens = jnp.concatenate([tokens, guesses], axis=1)
            # Rows that ended, and drafts beyond a row's end, are neither read nor written.
            fed = state.counts[:, None] + ahead
            alive = state.active[:, None] & (fed < rows.left[:, None])
            offsets = jnp.where(alive, rows.offsets[:, None] + fed, -1)
            shared_tokens = jnp.where(alive, rows.shared_tokens[:, None], 0)
            shared = SharedPages(rows.shared, shared_tokens.reshape(len(rows.shared), -1))
            positions = jnp.broadcast_to((rows.positions[:, None] + fed)[None], (3, *fed.shape))
            hidden, cache = text.extend(
                jnp.maximum(tokens, 0).reshape(-1),
                positions.reshape(3, -1),
                PagedCache(state.pages, rows.tables, offsets, shared),
                layers=layers,
            )
            # The number of a draw is the row's count of tokens, not the step of this loop. So a
            # sample does not depend on how its tokens are split into steps and calls.
            choices = jax.tree.map(lambda x: jnp.repeat(x, 1 + drafts), rows.choices)
            numbers = (rows.drawn[:, None] + fed).reshape(-1)
            drawn = sample(text.logits(hidden), choices, numbers)
            token, logprob = (x.reshape(fed.shape) for x in drawn)

            # Of the tokens drawn, those behind right guesses count, up to the row's end. In a row
            # that is active, at least one does.
            valid = alive & (ahead < accepted(token, tokens[:, 1:])[:, None])
            stops = (token[:, :, None] == rows.stops[:, None]).any(-1)
            valid &= jnp.cumsum(stops, axis=1) - stops == 0
            count = valid.sum(axis=1)
            last = jnp.take_along_axis(token, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
            counts = state.counts + count
            to = each, jnp.where(valid, fed, state.ids.shape[1])
            history = state.history
            if history is not None:
                entries = rows.lengths[:, None] + jnp.where(valid, fed, history.shape[1])
                history = history.at[each, entries].set(token, mode="drop")
            return _State(
                step=state.step + 1,
                active=state.active & (counts < rows.left) & ~(stops & valid).any(axis=1),
                counts=counts,
                tokens=last,
                history=history,
                pages=cache.pages,
                ids=state.ids.at[to].set(token, mode="drop"),
                logprobs=state.logprobs.at[to].set(logprob, mode="drop"),
            )

        empty = jnp.zeros((len(rows.tokens), steps * (1 + drafts)))
        start = _State(
            step=jnp.int32(0),
            active=rows.left > 0,
            counts=jnp.zeros_like(rows.left),
            tokens=rows.tokens,
            history=rows.history,
            pages=pool,
            ids=empty.astype(jnp.int32),
            logprobs=empty,
        )
        end = jax.lax.while_loop(unfinished, body, start)
        return end.pages, Drawn(end.ids, end.logprobs, end.counts)


def difference(weights: Any, expected: Any) -> str:
    """Describe how weights differ in names, shapes or types from those the programs expect.

    Returns:
        The end of an error message, or "" if they are equal.
    """
    if jax.tree.structure(weights) != jax.tree.structure(expected):
        given, wanted = (len(jax.tree.leaves(tree)) for tree in (weights, expected))
        return f"of {given} arrays, where the decoder has {wanted} with other names"
    pairs = zip(jax.tree.leaves_with_path(weights), jax.tree.leaves(expected), strict=True)
    for (path, new), old in pairs:
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            return (
                f"{jax.tree_util.keystr(path)} of {new.dtype}{new.shape}, "
                f"where the decoder has {old.dtype}{old.shape}"
            )
    return ""
