"""The engine's compiled programs: prefill, copies of pages, and the loop that decodes.

Owns the cache on the device: one pool of pages for all layers, `[layer, page, token, key and value heads, head_dim]` with keys and
values of a head side by side, as the TPU kernel wants them. Every program takes the pool donated and gives it back. The pool's last
page holds nothing: rows and tokens that are not there read it.
Invariant: shapes are those of `EngineSizes`, so that nothing compiles after each has been met once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from models.attention import DenseCache, PagedCache, Shared
from models.qwen3_vl.model import Qwen3VL
from models.qwen3_vl.text import KV, TextDecoder
from rollout.engine.sampling import Choices, sample

Pool = Float[Array, "l pages page 2k h"]
_ALL = slice(None)
MOST_STOP_IDS = 4  # of one row: part of every call's static shape


class Pieces(NamedTuple):
    """Tokens to prefill, a row a sequence: `lengths` of them count, after `before` tokens that are on the row's pages already."""

    ids: Int[Any, "b t"]
    positions: Int[Any, "3 b t"]
    visual: Float[Any, "b t c d"]  # at the tokens that stand for them
    index: Int[Any, "b t"]  # such a token's own place, -1 for text
    lengths: Int[Any, " b"]
    before: Int[Any, " b"]
    tables: Int[Any, "b m"]  # the pages of what is before, and of these tokens


class Rows(NamedTuple):
    """What is decoded, a row a sequence: its last token and where that stands, what it has on its pages, and how it goes on.

    A row sees the first `prefix_tokens` tokens of its line, then `own_tokens` tokens on the pages of its table; the table goes on with the
    pages that the new tokens take. `drawn` tokens were sampled before; `left` may still be, 0 in an empty row.
    """

    tokens: Int[Any, " b"]
    positions: Int[Any, " b"]
    prefix_tokens: Int[Any, " b"]
    own_tokens: Int[Any, " b"]
    tables: Int[Any, "b m"]
    drawn: Int[Any, " b"]
    left: Int[Any, " b"]
    stops: Int[Any, "b n"]  # -1 where there are fewer
    choices: Choices


class Drawn(NamedTuple):
    """New tokens of every row, `counts` of them, in a loop of so many `steps`."""

    ids: Int[Array, "b n"]
    logprobs: Float[Array, "b n"]
    counts: Int[Array, " b"]
    steps: Int[Array, ""]


class Lines(NamedTuple):
    """The shared starts of rows, read from their pages: one array a layer, a line for every `rows_per_prefix` rows."""

    k: tuple[Float[Array, "kp h u"], ...]
    v: tuple[Float[Array, "kp u h"], ...]


class Programs:
    """The programs for a model whose `weights` (of its text decoder) are given with every call; `page` tokens to a page.

    `paged`: whether tokens are decoded on the pages themselves (`attention.PagedCache`), or in arrays that the pages are read into.
    """

    def __init__(self, model: Qwen3VL, page: int, paged: bool):
        self._paged = paged
        self.page, self.text = page, model.config.text
        self._graph, weights = nnx.split(model.text)
        self.dtype = model.text.dtype
        place = jax.tree.leaves(weights)[0].sharding
        mesh = (
            place.mesh
            if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh)
            else None
        )
        # Heads of keys and values lie as the weights that make them do; everything else is whole on every device.
        heads = (
            place
            if mesh is None
            else NamedSharding(mesh, PartitionSpec(None, None, None, "tensor"))
        )
        lines = place if mesh is None else NamedSharding(mesh, PartitionSpec("tensor"))
        whole = place if mesh is None else NamedSharding(mesh, PartitionSpec())
        self._heads, self._lines = heads, lines
        on = functools.partial(_on, mesh)
        self.prefill = on(jax.jit(self._prefill, donate_argnums=1, out_shardings=heads))
        self.copy = on(jax.jit(self._copy, donate_argnums=0, out_shardings=heads))
        self.gather = on(jax.jit(self._gather, donate_argnums=1, out_shardings=lines))
        self.decode = on(
            jax.jit(
                self._decode,
                static_argnames=("steps", "width"),
                donate_argnums=1,
                out_shardings=(heads, whole),
            )
        )

    def make_pool(self, pages: int) -> Pool:
        """Room for `pages` pages, and the one that holds nothing."""
        text = self.text
        shape = (
            text.num_hidden_layers,
            pages + 1,
            self.page,
            2 * text.num_key_value_heads,
            text.head_dim,
        )
        return _zeros((shape,), self.dtype, self._heads)()[0]

    def make_lines(self, count: int, length: int) -> Lines:
        """`count` empty lines for starts of up to `length` tokens."""
        layers, k, h = (
            self.text.num_hidden_layers,
            self.text.num_key_value_heads,
            self.text.head_dim,
        )
        shapes = ((k * count, h, length),) * layers, ((k * count, length, h),) * layers
        return Lines(*(_zeros(each, self.dtype, self._lines)() for each in shapes))

    def _read(
        self, pool: Pool, tables: Int[Array, "*b m"], layer: Int[Array, ""] | slice = _ALL
    ) -> KV:
        """What is on pages, in order, of one layer or of all."""
        found = pool[layer, tables]
        found = with_layout_constraint(
            found, Layout(tuple(range(found.ndim)))
        )  # else TPU turns the whole pool around before it reads
        found = found.reshape(*found.shape[:-4], -1, *found.shape[-2:])
        return KV(found[..., 0::2, :], found[..., 1::2, :])

    def _write(
        self,
        pool: Pool,
        kv: KV,
        tables: Int[Array, "b m"],
        first: Int[Array, " b"],
        lengths: Int[Array, " b"],
    ) -> Pool:
        """Each row's keys and values into its slots from number `first` on."""
        step = jnp.arange(kv.k.shape[2])
        slots = first[:, None] + step
        pages = jnp.take_along_axis(
            tables, jnp.minimum(slots // self.page, tables.shape[1] - 1), axis=1
        )
        pages = jnp.where(step < lengths[:, None], pages, pool.shape[1])  # there is no such page
        both = jnp.stack(kv, axis=-2).reshape(
            *kv.k.shape[:3], -1, kv.k.shape[-1]
        )  # key, value, key, value, ...
        return pool.at[:, pages, slots % self.page].set(both.astype(pool.dtype), mode="drop")

    def _prefill(self, weights: Any, pool: Pool, pieces: Pieces) -> Pool:
        text: TextDecoder = nnx.merge(self._graph, weights)
        t = pieces.ids.shape[1]
        valid = jnp.arange(t) < pieces.lengths[:, None]
        before = pieces.tables.shape[1] * self.page - pages_of(t, self.page) * self.page
        mask = jnp.arange(before) < pieces.before[:, None]

        def past(
            layer: Int[Array, ""],
        ) -> KV:  # a layer at a time: all of them would be several times the pool
            kv = self._read(pool, pieces.tables[:, : before // self.page], layer)
            return KV(
                *(jnp.where(mask[..., None, None], x, 0) for x in kv)
            )  # what else is on the pages may be anything

        _, kv = text(
            pieces.ids,
            pieces.positions,
            segment_ids=valid.astype(jnp.int32),
            visual=pieces.visual,
            visual_index=pieces.index,
            prefix=past if before else None,
            prefix_mask=mask if before else None,
        )
        return self._write(pool, kv, pieces.tables, pieces.before, pieces.lengths)

    def _copy(self, pool: Pool, sources: Int[Array, " n"], targets: Int[Array, " n"]) -> Pool:
        return pool.at[:, targets].set(pool[:, sources])

    def _gather(
        self, pool: Pool, lines: Lines, tables: Int[Array, " m"], line: Int[Array, ""]
    ) -> Lines:
        """Reads pages into a line."""
        k, v = self._read(pool, tables)  # [l, u, k, h]
        heads = k.shape[2]

        def put(old: Array, new: Float[Array, "k x y"]) -> Array:
            return old.reshape(heads, -1, *new.shape[1:]).at[:, line].set(new).reshape(old.shape)

        return Lines(
            tuple(put(old, new.transpose(1, 2, 0)) for old, new in zip(lines.k, k, strict=True)),
            tuple(put(old, new.transpose(1, 0, 2)) for old, new in zip(lines.v, v, strict=True)),
        )

    def _decode(
        self, weights: Any, pool: Pool, lines: Lines | None, rows: Rows, *, steps: int, width: int
    ) -> tuple[Pool, Drawn]:
        """Up to `steps` tokens for every row; rows see up to `width` tokens of their own. Ends early when no row has anything left."""
        text: TextDecoder = nnx.merge(self._graph, weights)
        layers = text.decode_layers()
        if self._paged:
            cache = PagedCache(pool, rows.tables, rows.own_tokens)
        else:
            kv = self._read(pool, rows.tables[:, : width // self.page])
            cache = DenseCache.prefilled(kv, jnp.arange(width) < rows.own_tokens[:, None], steps)
            if lines is not None:
                seen = jnp.arange(lines.k[0].shape[-1]) < rows.prefix_tokens[:, None]
                cache = cache._replace(shared=Shared(*lines, seen))

        def cond(state):
            step, active = state[0], state[1]
            return (step < steps) & active.any()

        def body(state):
            step, active, counts, tokens, cache, ids, logprobs = state
            hidden, cache = text.decode(
                tokens, jnp.broadcast_to(rows.positions + step, (3, len(tokens))), cache, layers
            )
            token, logprob = sample(text.logits(hidden), rows.choices, rows.drawn + counts)
            cache, counts = cache.advance(active), counts + active
            ids, logprobs = ids.at[:, step].set(token), logprobs.at[:, step].set(logprob)
            active = active & (counts < rows.left) & (token[:, None] != rows.stops).all(1)
            return step + 1, active, counts, token, cache, ids, logprobs

        empty = jnp.zeros((len(rows.tokens), steps))
        active = rows.left > 0
        state = (
            jnp.int32(0),
            active,
            active.astype(jnp.int32) * 0,
            rows.tokens,
            cache,
            empty.astype(jnp.int32),
            empty,
        )
        step, _, counts, _, cache, ids, logprobs = jax.lax.while_loop(cond, body, state)
        drawn = Drawn(ids, logprobs, counts, step)
        if isinstance(cache, PagedCache):
            return cache.pages, drawn
        return self._write(
            pool, KV(*cache.since(width)), rows.tables, rows.own_tokens, counts
        ), drawn


@functools.cache  # memory is taken anew after every sleep, and nothing compiles twice
def _zeros(
    shapes: tuple[tuple[int, ...], ...], dtype: Any, place: Any
) -> Callable[[], tuple[Array, ...]]:
    return jax.jit(lambda: tuple(jnp.zeros(shape, dtype) for shape in shapes), out_shardings=place)


def _on(mesh: Mesh | None, program: Callable[..., Any]) -> Callable[..., Any]:
    """A program that runs with the mesh set: the kernels for TPU have to know it."""
    if mesh is None:
        return program

    @functools.wraps(program)
    def run(*arguments: Any, **options: Any) -> Any:
        with jax.set_mesh(mesh):
            return program(*arguments, **options)

    return run


def difference(weights: Any, known: Any) -> str:
    """What tells weights from those that programs are compiled for; nothing where they may take their place."""
    if jax.tree.structure(weights) != jax.tree.structure(known):
        return f"of {len(jax.tree.leaves(weights))} arrays, where the decoder has {len(jax.tree.leaves(known))} of other names"
    for (path, new), old in zip(
        jax.tree.leaves_with_path(weights), jax.tree.leaves(known), strict=True
    ):
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            return f"{jax.tree_util.keystr(path)} of {new.dtype}{new.shape}, where the decoder has {old.dtype}{old.shape}"
    return ""


def pages_of(tokens: int, page: int) -> int:
    """Pages that so many tokens touch, wherever on a page they start."""
    return -(-tokens // page) + 1
