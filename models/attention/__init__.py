"""Attention: `attend` for sequences; `DenseCache` and `PagedCache` for one new token per row.

A token sees earlier tokens of its segment, and tokens before them: the valid positions of its row's
prefix, or the prompt of its group at the beginning of a packed row. The kernel is
Splash on TPU (`splash`; `flash` for packed rows), cuDNN on GPU (`cudnn`), and plain XLA (`xla`)
elsewhere or for arrays that a kernel does not support. Over several devices, kernels run inside
`spread`. All kernels give valid tokens the same vectors; vectors of padding may differ.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from models.attention import cudnn, flash, splash, spread, xla
from models.attention.cache import DenseCache, Shared
from models.attention.paged import PagedCache
from models.attention.target import SAVED, Masks, platform
from models.sharding import current_mesh

__all__ = [
    "SAVED",
    "DenseCache",
    "Implementation",
    "PagedCache",
    "Shared",
    "attend",
    "choose",
    "platform",
]

Implementation = Literal["flash", "splash", "cudnn", "xla"]
QUERY_CHUNK = 128


@jax.named_scope("attention")
def attend(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    *,
    causal: bool = True,
    segment_ids: Int[Array | np.ndarray, "b t"] | None = None,
    prefix: tuple[Float[Array, "b s k h"], Float[Array, "b s k h"]] | None = None,
    prefix_mask: Bool[Array | np.ndarray, "b s"] | None = None,
    starts: Int[Array | np.ndarray, "b t"] | None = None,
    shared: Int[Array | np.ndarray, " b"] | None = None,
    pieces: int = 1,
    chunk: int = QUERY_CHUNK,
    implementation: Implementation | None = None,
) -> Float[Array, "b t n h"]:
    """Grouped-query attention; query head i uses kv head i // (n / k).

    Behind a prefix of s = 3 positions, the t = 2 tokens of a row see (#):

                  prefix   row
        token 0   # # #    # .
        token 1   # # #    # #

    A packed row (`starts` and `shared`) holds prompts, and then segments that continue them. Here
    groups 1 and 2 have a prompt each, and group 1 has two segments:

        place        0 1   2     3 4   5     6
        segment_ids  1 1   2     1 1   1     2
        starts       0 0   2     3 3   5     6
        shared       3

        0            # .   .     . .   .     .
        1            # #   .     . .   .     .
        2            . .   #     . .   .     .
        3            # #   .     # .   .     .
        4            # #   .     # #   .     .
        5            # #   .     . .   #     .
        6            . .   #     . .   .     #

    The query at place q sees the key at place k if their segment ids are equal, k <= q, and
    k >= starts[q] or k < shared.

    The outputs of padding are finite but meaningless. If a mesh is set (`jax.set_mesh`), its
    platform decides the kernel. On TPU a mesh must be set if arrays are sharded over devices.

    Args:
        q: queries.
        k: keys of the same rows.
        v: values of the same rows.
        causal: whether a token sees only itself and earlier tokens of its row.
        segment_ids: a token sees tokens of the same segment; None: of its whole row. With a prefix
            a row is one segment, where 0 is padding and any other number is valid.
        prefix: keys and values of tokens before each row.
        prefix_mask: which prefix positions are valid; None: all.
        starts: packed rows: the place where the token's own segment, or prompt, begins. Places
            count from the beginning of the row, or of its first piece.
        shared: packed rows: number of leading places that hold prompts. All pieces of a row repeat
            its number.
        pieces: number of consecutive rows that form one sequence, each on a device of its own.
        chunk: queries that the XLA kernel takes at a time; of packed rows at most `xla.TILE`, since
            they are computed in tiles of this side.
        implementation: the kernel; None chooses the fastest that supports the case. A named kernel
            also runs away from its device, slowly, for tests.

    Raises:
        ValueError: a prefix with causal=False or pieces; `starts` without `shared` and
            `segment_ids`, or with a prefix or causal=False; a named kernel that does not support
            the case.
    """
    if prefix is not None and (not causal or pieces > 1):
        raise ValueError(
            f"causal = {causal}, pieces = {pieces}: a prefix comes before whole rows; leave causal "
            "True and pieces 1, or put the prefix into the rows"
        )
    packed = starts is not None or shared is not None
    missing = starts is None or shared is None or segment_ids is None
    if packed and (missing or prefix is not None or not causal):
        raise ValueError(
            "starts, shared: packed rows need both and segment_ids, are causal and have no prefix; "
            "pass all three, leave causal True, and put the prefix into the rows"
        )
    masks = Masks(*jax.tree.map(jnp.asarray, (segment_ids, prefix_mask, starts, shared)))
    if masks.segments is not None and prefix is not None:
        masks = masks._replace(segments=(masks.segments != 0).astype(jnp.int32))
    target = platform()
    kernels = {
        "flash": functools.partial(flash.attend, interpret=target != "tpu"),
        "splash": functools.partial(splash.attend, interpret=target != "tpu"),
        "cudnn": functools.partial(
            cudnn.attend, implementation="cudnn" if target == "gpu" else "xla"
        ),
        "xla": functools.partial(xla.attend, chunk=chunk),
    }
    name = implementation or choose(target, q, k, prefix, pieces, packed)
    if name != "xla" and packed != (name == "flash"):
        raise ValueError(f"implementation = {name!r}: 'flash' is for packed rows; leave it None")
    run = spread.attend if spread.fits(q, k, pieces) else spread.join
    return run(functools.partial(kernels[name], causal=causal), q, k, v, prefix, masks, pieces)


def choose(
    target: str,
    q: Float[Array | jax.ShapeDtypeStruct, "b t n h"],
    k: Float[Array | jax.ShapeDtypeStruct, "b t k h"],
    prefix: tuple[Array | jax.ShapeDtypeStruct, Array | jax.ShapeDtypeStruct] | None = None,
    pieces: int = 1,
    packed: bool = False,
) -> Implementation:
    """The kernel of the platform `target` if it supports these arrays, else XLA."""
    # The compiler cannot shard the kernels of a TPU: over several devices it needs `spread`.
    whole_or_spread = current_mesh() is None or spread.fits(q, k, pieces)
    if target == "tpu" and splash.supports(q) and whole_or_spread:
        return "flash" if packed else "splash"
    if target == "gpu" and not packed and cudnn.supports(q, prefix):
        return "cudnn"
    return "xla"
