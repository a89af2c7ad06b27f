"""The engine's compiled programs: prefill, page copies, and the decoding loop.

The KV cache is one array, the pool: a fixed number of pages for all layers. On a page, the keys and
values of a head are neighbours, which is what the TPU kernel reads:

    pool [layer, page, token, 2 * kv head, head_dim]
                              key of head 0, value of head 0, key of head 1, value of head 1, ...

The pool's last page is never allocated. Idle rows and padding read it and write to it.

The pool takes most of the device's memory, so two of them would not fit. Every program therefore
takes the pool donated and returns it: XLA writes into the same buffer. The caller's old reference
is dead afterwards.

All shapes come from `EngineSizes`, so after each program was compiled once nothing compiles again.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from models.attention import DenseCache, PagedCache, RowLayout, Shared
from models.lora import split
from models.model import VisionLanguageModel
from models.sharding import MeshProgram, mesh_of, zeros
from models.text import KV, TextDecoder, VisualBank
from rollout.engine.pages import page_count
from rollout.engine.sampling import Choices, sample

Pool = Float[Array, "l pages page kv h"]
# Visual vectors of one call of prefill, those of all its rows; c = 1 + DeepStack levels.
Bank = Float[Array, "bank c d"]
# Vectors per transfer to the device. For the 8B model in bfloat16 these are 16 MiB.
CHUNK = 512
MOST_STOP_IDS = 64  # per row: the width of an array that every program takes

_ALL_LAYERS = slice(None)


class Pieces(NamedTuple):
    """Tokens to prefill: one row per sequence, with its next tokens.

    Attributes:
        ids: token ids, padded to t.
        positions: M-RoPE positions.
        index: the vector of each visual token in the bank, -1 for text; None in a program for text.
        lengths: number of tokens that are not padding.
        before: number of the sequence's tokens that are already on its pages.
        tables: the pages of the tokens before, then the pages that these tokens are written to.
    """

    ids: Int[Any, "b t"]
    positions: Int[Any, "3 b t"]
    index: Int[Any, "b t"] | None
    lengths: Int[Any, " b"]
    before: Int[Any, " b"]
    tables: Int[Any, "b m"]


class DecodeRows(NamedTuple):
    """What to decode: one row per sequence.

    A row attends to the first `prefix_tokens` tokens of its block's prefix, then to `own_tokens`
    tokens on the pages of its table.

    Attributes:
        tokens: the last token of each row, the input of the first step.
        positions: the position of that token.
        prefix_tokens: tokens that the row reads in its block's copy of a prefix.
        own_tokens: tokens that it reads on its own pages.
        tables: these pages, then the pages that new tokens are written to.
        drawn: tokens sampled so far; the number of the next draw.
        left: tokens it may still sample, 0 in an idle row.
        stops: ids that end the row, padded with -1.
        choices: how its tokens are sampled.
    """

    tokens: Int[Any, " b"]
    positions: Int[Any, " b"]
    prefix_tokens: Int[Any, " b"]
    own_tokens: Int[Any, " b"]
    tables: Int[Any, "b m"]
    drawn: Int[Any, " b"]
    left: Int[Any, " b"]
    stops: Int[Any, "b n"]
    choices: Choices


class Drawn(NamedTuple):
    """New tokens: the first `counts` of each row, of at most n."""

    ids: Int[Any, "b n"]
    logprobs: Float[Any, "b n"]
    counts: Int[Any, " b"]


class Prefixes(NamedTuple):
    """Copies of shared prefixes, one per block of rows, gathered from their pages.

    One array per layer. Head j of block i is entry j * blocks + i, as `attention.Shared` wants it.
    """

    k: tuple[Float[Array, "kp h u"], ...]
    v: tuple[Float[Array, "kp u h"], ...]


class Programs:
    """The jitted functions for one model.

    With every call they take the text decoder's weights: the trained and the frozen ones.

    Args:
        model: gives structure, type and sharding of the weights.
        page: tokens per page.
        paged: decode on the pages themselves (`attention.PagedCache`). Otherwise the rows' pages
            are gathered into dense arrays before the loop, and new tokens written back after it.
    """

    def __init__(self, model: VisionLanguageModel, page: int, paged: bool):
        self.page = page
        self.text = model.config.text
        self.dtype = model.text.dtype
        self._paged = paged
        self._graph, *weights = split(model.text)
        sharding = jax.tree.leaves(weights)[0].sharding
        pool_sharding = prefix_sharding = result_sharding = sharding
        mesh = mesh_of(weights)
        if mesh is not None:
            # Keys and values are sharded like the weights that compute them: by heads over
            # `tensor`, on axis 3 of the pool and axis 0 of the prefixes. Results are replicated.
            pool_sharding = NamedSharding(mesh, PartitionSpec(None, None, None, "tensor"))
            prefix_sharding = NamedSharding(mesh, PartitionSpec("tensor"))
            result_sharding = NamedSharding(mesh, PartitionSpec())
        self._pool_sharding = pool_sharding
        self._prefix_sharding = prefix_sharding
        self._bank_sharding = result_sharding
        self._vectors = (1 + model.config.vision.levels, self.text.hidden_size)

        # In `gather` the prefixes are donated, in `fill` the bank, and in all others the pool.
        prefill = jax.jit(self._prefill, donate_argnums=1, out_shardings=pool_sharding)
        copy = jax.jit(self._copy, donate_argnums=0, out_shardings=pool_sharding)
        gather = jax.jit(self._gather, donate_argnums=1, out_shardings=prefix_sharding)
        fill = jax.jit(self._fill, donate_argnums=0, out_shardings=result_sharding)
        decode = jax.jit(
            self._decode,
            static_argnames=("steps", "width"),
            donate_argnums=1,
            out_shardings=(pool_sharding, result_sharding),
        )
        # On a mesh, the TPU kernels look it up.
        self.prefill = MeshProgram(prefill, mesh)
        self.copy = MeshProgram(copy, mesh)
        self.gather = MeshProgram(gather, mesh)
        self.fill = MeshProgram(fill, mesh)
        self.decode = MeshProgram(decode, mesh)

    def abstract_pool(self, pages: int) -> jax.ShapeDtypeStruct:
        """Return the shape, type and sharding of `make_pool`, to compile programs before it takes
        memory."""
        heads = 2 * self.text.num_key_value_heads
        shape = (self.text.num_hidden_layers, pages + 1, self.page, heads, self.text.head_dim)
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=self._pool_sharding)

    def make_pool(self, pages: int) -> Pool:
        """Return a pool of `pages` pages filled with zeros, and one more page for padding to
        read."""
        return zeros(self.abstract_pool(pages))

    def abstract_prefixes(self, blocks: int, length: int) -> Prefixes:
        """Return the shapes, types and shardings of `make_prefixes`."""
        layers = self.text.num_hidden_layers
        entries = self.text.num_key_value_heads * blocks
        h = self.text.head_dim
        sharding = self._prefix_sharding
        k: Any = jax.ShapeDtypeStruct((entries, h, length), self.dtype, sharding=sharding)
        v: Any = jax.ShapeDtypeStruct((entries, length, h), self.dtype, sharding=sharding)
        return Prefixes((k,) * layers, (v,) * layers)

    def make_prefixes(self, blocks: int, length: int) -> Prefixes:
        """Return arrays of zeros for one prefix of up to `length` tokens per block."""
        return zeros(self.abstract_prefixes(blocks, length))

    def bank_shape(self, tokens: int) -> tuple[int, int, int]:
        """Return the shape of a bank for up to `tokens` visual tokens, in whole chunks."""
        return math.ceil(tokens / CHUNK) * CHUNK, *self._vectors

    def abstract_bank(self, tokens: int) -> jax.ShapeDtypeStruct:
        """Return the shape, type and sharding of `make_bank`."""
        shape = self.bank_shape(tokens)
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=self._bank_sharding)

    def make_bank(self, tokens: int) -> Bank:
        """Return a bank of zeros for up to `tokens` visual tokens."""
        return zeros(self.abstract_bank(tokens))

    def _fill(self, bank: Bank, chunk: Float[Any, "n c d"], first: Int[Any, ""]) -> Bank:
        """Write `chunk` to the bank's vectors from `first` on."""
        return jax.lax.dynamic_update_slice_in_dim(bank, chunk, first, axis=0)

    def _read(
        self,
        pool: Pool,
        tables: Int[Array, "*b m"],
        layer: Int[Array, ""] | slice = _ALL_LAYERS,
    ) -> KV:
        """Return keys and values on the pages of a table, in its order, for one layer or for all.

        Returns arrays [..., m * page, k, h]: the tokens of all pages, joined.
        """
        kv = pool[layer, tables]  # [..., m, page, 2k, h]
        # Without this constraint XLA on TPU transposes the whole pool before it reads.
        kv = with_layout_constraint(kv, Layout(tuple(range(kv.ndim))))
        kv = kv.reshape(*kv.shape[:-4], -1, *kv.shape[-2:])
        return KV(kv[..., 0::2, :], kv[..., 1::2, :])

    def _write(
        self,
        pool: Pool,
        kv: KV,
        tables: Int[Array, "b m"],
        first: Int[Array, " b"],
        lengths: Int[Array, " b"],
    ) -> Pool:
        """Write each row's keys and values [l, b, t, k, h] to its pages, from offset `first` on.

        Offset n of a row is token n % page of its page number n // page.
        """
        step = jnp.arange(kv.k.shape[2])[None, :]
        offsets = first[:, None] + step
        columns = jnp.minimum(offsets // self.page, tables.shape[1] - 1)
        pages = jnp.take_along_axis(tables, columns, axis=1)
        # Padding is sent to a page that does not exist, where mode="drop" discards it. A page that
        # does exist could be written twice in one scatter, in any order.
        pages = jnp.where(step < lengths[:, None], pages, pool.shape[1])
        # [l, b, t, k, 2, h] -> [l, b, t, 2k, h]: key, value, key, value, ...
        both = jnp.stack(kv, axis=-2)
        both = both.reshape(*kv.k.shape[:3], -1, kv.k.shape[-1])
        return pool.at[:, pages, offsets % self.page].set(both.astype(pool.dtype), mode="drop")

    def _prefill(self, weights: Any, pool: Pool, bank: Bank | None, pieces: Pieces) -> Pool:
        """Compute the tokens of `pieces` and write their keys and values to their pages.

        A program for text has neither a bank nor an index into it.
        """
        text: TextDecoder = nnx.merge(self._graph, *weights)
        t = pieces.ids.shape[1]
        valid = jnp.arange(t)[None, :] < pieces.lengths[:, None]
        # A table has the pages of the tokens before, then the pages of the new tokens. The number
        # of columns is static, which makes `pages_before` static.
        pages_before = pieces.tables.shape[1] - pages_of(t, self.page)
        before = pages_before * self.page
        mask = jnp.arange(before)[None, :] < pieces.before[:, None]

        visual = None
        if bank is not None and pieces.index is not None:
            visual = VisualBank(bank[None], pieces.index)

        # The decoder asks for one layer at a time. For all layers at once, the gathered keys and
        # values of all rows would take several times the memory of the pool.
        def read_before(layer: Int[Array, ""]) -> KV:
            kv = self._read(pool, pieces.tables[:, :pages_before], layer)
            # Unused offsets may hold anything, even NaN, which survives an attention weight of 0.
            return KV(*(jnp.where(mask[..., None, None], x, 0) for x in kv))

        _, kv = text(
            pieces.ids,
            pieces.positions,
            layout=RowLayout(
                segments=valid.astype(jnp.int32), prefix_mask=mask if before else None
            ),
            visual=visual,
            prefix=read_before if before else None,
        )
        return self._write(pool, kv, pieces.tables, pieces.before, pieces.lengths)

    def _copy(self, pool: Pool, sources: Int[Array, " n"], targets: Int[Array, " n"]) -> Pool:
        return pool.at[:, targets].set(pool[:, sources])

    def _gather(
        self, pool: Pool, prefixes: Prefixes, table: Int[Array, " m"], block: Int[Array, ""]
    ) -> Prefixes:
        """Copy the pages of one block's prefix into the block's copy."""
        k, v = self._read(pool, table)  # [l, u, k, h]
        heads = k.shape[2]

        def put(old: Array, new: Float[Array, "k x y"]) -> Array:
            by_head = old.reshape(heads, -1, *new.shape[1:])  # [k, blocks, x, y]
            return by_head.at[:, block].set(new).reshape(old.shape)

        return Prefixes(
            tuple(put(old, x.transpose(1, 2, 0)) for old, x in zip(prefixes.k, k, strict=True)),
            tuple(put(old, x.transpose(1, 0, 2)) for old, x in zip(prefixes.v, v, strict=True)),
        )

    def _cache(
        self, pool: Pool, prefixes: Prefixes | None, rows: DecodeRows, steps: int, width: int
    ) -> PagedCache | DenseCache:
        """Return the cache that the rows decode with, which has room for `steps` more tokens."""
        if self._paged:
            return PagedCache(pool, rows.tables, rows.own_tokens)
        kv = self._read(pool, rows.tables[:, : width // self.page])
        own = jnp.arange(width)[None, :] < rows.own_tokens[:, None]
        cache = DenseCache.prefilled(kv, own, steps)
        if prefixes is None:
            return cache
        length = prefixes.k[0].shape[-1]
        seen = jnp.arange(length)[None, :] < rows.prefix_tokens[:, None]
        return cache._replace(shared=Shared(*prefixes, seen))

    def _decode(
        self,
        weights: Any,
        pool: Pool,
        prefixes: Prefixes | None,
        rows: DecodeRows,
        *,
        steps: int,
        width: int,
    ) -> tuple[Pool, Drawn]:
        """Sample up to `steps` tokens for every row. Ends early when no row is active.

        A row reads up to `width` tokens on its own pages.
        """
        text: TextDecoder = nnx.merge(self._graph, *weights)
        layers = text.decode_layers()
        cache = self._cache(pool, prefixes, rows, steps, width)

        def unfinished(state: tuple) -> Bool[Array, ""]:
            step, active = state[0], state[1]
            return (step < steps) & active.any()

        # Shapes are static, so finished rows are still computed. Their tokens are beyond `counts`
        # and so never read, and `advance` leaves them out of the cache.
        def body(state: tuple) -> tuple:
            step, active, counts, tokens, cache, ids, logprobs = state
            positions = jnp.broadcast_to(rows.positions + step, (3, len(tokens)))
            hidden, cache = text.decode(tokens, positions, cache, layers)
            # The number of the draw is the row's count of tokens, not the step of this loop. So a
            # sample does not depend on how its tokens are split into calls.
            token, logprob = sample(text.logits(hidden), rows.choices, rows.drawn + counts)
            cache = cache.advance(active)
            counts = counts + active
            ids = ids.at[:, step].set(token)
            logprobs = logprobs.at[:, step].set(logprob)
            stopped = (token[:, None] == rows.stops).any(1)
            active = active & (counts < rows.left) & ~stopped
            return step + 1, active, counts, token, cache, ids, logprobs

        active = rows.left > 0
        counts = jnp.zeros_like(active, jnp.int32)
        empty = jnp.zeros((len(rows.tokens), steps))
        ids = empty.astype(jnp.int32)
        state = (jnp.int32(0), active, counts, rows.tokens, cache, ids, empty)
        state = jax.lax.while_loop(unfinished, body, state)
        _, _, counts, _, cache, ids, logprobs = state
        drawn = Drawn(ids, logprobs, counts)
        if isinstance(cache, PagedCache):
            return cache.pages, drawn
        # Columns from `width` on hold the new tokens. Write them after the row's own tokens.
        new = KV(*cache.since(width))
        return self._write(pool, new, rows.tables, rows.own_tokens, counts), drawn


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


def pages_of(tokens: int, page: int) -> int:
    """Return an upper bound on the pages that hold `tokens` tokens, if they may start within a
    page."""
    return page_count(tokens, page) + 1
