"""Attention: `attend` for sequences; `DenseCache` and `PagedCache` for one new token per row.

A token sees earlier tokens of its segment, and the valid positions of a prefix that several rows
may share. The kernel is Splash on TPU (`splash`), cuDNN on GPU (`cudnn`), and plain XLA (`xla`)
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

from models.attention import cudnn, splash, spread, xla
from models.attention.cache import DenseCache, Shared
from models.attention.paged import PagedCache
from models.attention.target import SAVED, platform
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

Implementation = Literal["splash", "cudnn", "xla"]
QUERY_CHUNK = 128


def attend(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    *,
    causal: bool = True,
    segment_ids: Int[Array | np.ndarray, "b t"] | None = None,
    prefix: tuple[Float[Array, "p s k h"], Float[Array, "p s k h"]] | None = None,
    prefix_mask: Bool[Array | np.ndarray, "p s"] | None = None,
    pieces: int = 1,
    chunk: int = QUERY_CHUNK,
    implementation: Implementation | None = None,
) -> Float[Array, "b t n h"]:
    """Grouped-query attention; query head i uses kv head i // (n / k).

    With a prefix of s = 3 positions that two rows of t = 2 tokens share, the tokens see (#):

                         prefix   row 0   row 1
        row 0, token 0   # # #    # .     . .
        row 0, token 1   # # #    # #     . .
        row 1, token 0   # # #    . .     # .
        row 1, token 1   # # #    . .     # #

    The outputs of padding are finite but meaningless. If a mesh is set (`jax.set_mesh`), its
    platform decides the kernel. On TPU a mesh must be set if arrays are sharded over devices.

    Args:
        q: queries.
        k: keys of the same rows.
        v: values of the same rows.
        causal: whether a token sees only itself and earlier tokens of its row.
        segment_ids: a token sees tokens of the same segment; None: of its whole row. With a prefix
            a row is one segment, where 0 is padding and any other number is valid.
        prefix: keys and values of p prompts, not repeated. With g = b / p, rows
            r * g ... r * g + g - 1 see prompt r.
        prefix_mask: which prefix positions are valid; None: all.
        pieces: number of consecutive rows that form one sequence, each on a device of its own. It
            applies to the rows of the prefix, or without one to those of q, k and v.
        chunk: queries that the XLA kernel takes at a time.
        implementation: the kernel; None chooses the fastest that supports the case. A named kernel
            also runs away from its device, slowly, for tests.

    Raises:
        ValueError: a prefix with causal=False.
    """
    if prefix is not None and not causal:
        raise ValueError(
            "causal = False: a prefix comes before its rows; leave causal True, or put the prefix "
            "into the rows"
        )
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids)
        if prefix is not None:
            segment_ids = (segment_ids != 0).astype(jnp.int32)
    if prefix_mask is not None:
        prefix_mask = jnp.asarray(prefix_mask)
    target = platform()
    kernels = {
        "splash": functools.partial(splash.attend, interpret=target != "tpu"),
        "cudnn": functools.partial(
            cudnn.attend, implementation="cudnn" if target == "gpu" else "xla"
        ),
        "xla": functools.partial(xla.attend, chunk=chunk),
    }
    kernel = kernels[implementation or choose(target, q, k, prefix, pieces)]
    run = spread.attend if spread.fits(q, k, prefix, pieces) else spread.join
    return run(
        functools.partial(kernel, causal=causal), q, k, v, segment_ids, prefix, prefix_mask, pieces
    )


def choose(
    target: str,
    q: Float[Array | jax.ShapeDtypeStruct, "b t n h"],
    k: Float[Array | jax.ShapeDtypeStruct, "b t k h"],
    prefix: spread.AnyPrefix | None = None,
    pieces: int = 1,
) -> Implementation:
    """The kernel of the platform `target` if it supports these arrays, else XLA."""
    # The compiler cannot shard the Splash kernel: over several devices it needs `spread`.
    whole_or_spread = current_mesh() is None or spread.fits(q, k, prefix, pieces)
    if target == "tpu" and splash.supports(q) and whole_or_spread:
        return "splash"
    if target == "gpu" and cudnn.supports(q, prefix):
        return "cudnn"
    return "xla"
