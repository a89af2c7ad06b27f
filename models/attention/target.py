"""Shared by all kernels: the layout of rows, partial results, visible tiles, the platform."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

# `checkpoint_name` of outputs and log-sum-exps. If a remat policy saves this name, the backward
# pass does not repeat the forward pass of attention.
SAVED = "attention"
# Score of a masked key. Finite: with -inf, a row without any key would be NaN.
MASKED = -1e30


# Annotations are not checked, because JAX also builds this tree with specs as leaves.
@no_type_check
@struct.dataclass
class RowLayout:
    """What each token of a batch of rows sees. By default, itself and earlier tokens of its row.

    A packed row (`starts` and `shared`) holds prompts, and then segments that continue them. Here
    groups 1 and 2 have a prompt each, and group 1 has two segments:

        position     0 1   2     3 4   5     6
        segments     1 1   2     1 1   1     2
        starts       0 0   2     3 3   5     6
        shared       3

        0            # .   .     . .   .     .
        1            # #   .     . .   .     .
        2            . .   #     . .   .     .
        3            # #   .     # .   .     .
        4            # #   .     # #   .     .
        5            # #   .     . .   #     .
        6            . .   #     . .   .     #

    The query at position q sees the key at position k if their segments are equal, k <= q, and
    k >= starts[q] or k < shared.
    """

    segments: Int[Array | np.ndarray, "b t"] | None = None
    """A token sees tokens of the same segment; None: of its whole row."""
    starts: Int[Array | np.ndarray, "b t"] | None = None
    """Packed rows: the position where the token's own segment, or prompt, begins. Positions count
    from the beginning of the row, or of its first piece."""
    shared: Int[Array | np.ndarray, " b"] | None = None
    """Packed rows: number of leading positions that hold prompts. All pieces of a row repeat it."""
    pieces: int = struct.field(pytree_node=False, default=1)
    """Number of consecutive rows that form one sequence, each on a device of its own."""
    causal: bool = struct.field(pytree_node=False, default=True)
    """Whether a token sees no later tokens."""

    @property
    def packed(self) -> bool:
        """Whether segments of a row share prompts."""
        return self.starts is not None or self.shared is not None

    def padded(self, tile: int) -> RowLayout:
        """Return the layout of packed rows that are filled up to whole tiles; see `pad_rows`."""
        return dataclasses.replace(
            self, segments=pad_rows(self.segments, tile), starts=pad_rows(self.starts, tile)
        )

    def check(self) -> None:
        """Raise ValueError for fields that contradict each other."""
        arrays = (self.segments, self.starts, self.shared)
        if self.packed and not (self.causal and all(x is not None for x in arrays)):
            raise ValueError(
                "layout: packed rows need segments, starts and shared, and are causal; pass all "
                "three and leave causal True"
            )

    def attributes(self) -> tuple[Array, Array, Array]:
        """Return three attributes of each position of packed rows.

        They are the group of its query, the position where the query's segment begins, and the
        group whose prompt the key belongs to (0: none).
        """
        assert self.segments is not None and self.starts is not None and self.shared is not None
        position = jnp.arange(self.segments.shape[1])[None]
        # Padding begins at itself and has no prompt, so it sees only itself.
        return (
            jnp.where(self.segments == 0, -1, self.segments),
            jnp.where(self.segments == 0, position, self.starts),
            jnp.where(position < self.shared[:, None], self.segments, 0),
        )


class Partial(NamedTuple):
    """Attention of j jobs of t queries to some of their keys. Parts are merged by log-sum-exp.

    The weight of a part is exp(logsumexp), so a part without keys has the weight 0.
    """

    out: Float[Array, "j t n h"]
    """In float32, normalised over the keys that a query sees; 0 where it sees none."""
    logsumexp: Float[Array, "j t n"]
    """Natural logarithm of the sum of exp(score), in float32; MASKED where a query sees no key."""


def merge(out: Float[Array, "s *b h"], logsumexp: Float[Array, "s *b"]) -> Partial:
    """Return attention to the keys of s parts, joined."""
    total = jax.nn.logsumexp(logsumexp, axis=0)
    shares = jnp.exp(logsumexp - total[None])[..., None]
    # A part without keys may not have been written: NaN * 0 is NaN.
    written = jnp.where(logsumexp[..., None] > MASKED, out, 0)
    return Partial(jnp.sum(written * shares, axis=0), total)


def platform() -> str:
    """Return the platform that the code being traced will run on: "tpu", "gpu" or "cpu".

    It is the platform of the current mesh, which may describe another machine (to compile ahead of
    time). Without a mesh it is the default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def pad_rows(x: Any, tile: int) -> Array:
    """Fill axis 1, the positions of a row, up to whole tiles."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % tile)] + [(0, 0)] * (x.ndim - 2))


def visible_tiles(layout: RowLayout, queries: int, keys: int) -> Bool[Array, "b i j"]:
    """Return which tiles of rows, of `queries` queries x `keys` keys, may hold a visible pair.

    The layout has all three arrays; rows that are not causal use the segments only. The length of a
    row is a multiple of both sizes. Segments and prompts count by the lowest and highest number in
    a tile, so the result is exact if they are numbered in their order. The tile of a query's own
    position always counts: every query, padding too, has at least one key.
    """
    segments, starts, shared = layout.segments, layout.starts, layout.shared
    assert segments is not None and starts is not None and shared is not None
    b, t = segments.shape
    valid = segments != 0
    prompt = valid & (jnp.arange(t)[None] < shared[:, None])

    def ends(x: Any, counted: Array, size: int) -> tuple[Array, Array]:
        """Return the smallest and largest x per tile, of the positions that are counted."""
        smallest = jnp.where(counted, x, jnp.iinfo(jnp.int32).max).reshape(b, -1, size).min(-1)
        return smallest, jnp.where(counted, x, -1).reshape(b, -1, size).max(-1)

    first_group, last_group = (x[:, :, None] for x in ends(segments, valid, queries))
    first_key, last_key = (x[:, None] for x in ends(segments, valid, keys))
    same = (first_key <= last_group) & (first_group <= last_key)
    query = jnp.arange(0, t, queries)[None, :, None]
    key = jnp.arange(0, t, keys)[None, None]
    earlier = key < query + queries
    at_itself = earlier & (key + keys > query)
    if not layout.causal:
        return same | at_itself
    first_prompt, last_prompt = (x[:, None] for x in ends(segments, prompt, keys))
    first_own = ends(starts, valid, queries)[0][:, :, None]
    prompts = (first_prompt <= last_group) & (first_group <= last_prompt)
    return at_itself | (earlier & (prompts | (same & (key + keys > first_own))))
