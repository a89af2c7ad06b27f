"""Attention: `attend` for sequences, and caches (`DenseCache`, `PagedCache`) for one new token a row.

Owns who may look at whom - earlier tokens of the same segment, and the valid positions of a prefix that several rows share - and
which kernel does it: Splash on TPU (`splash`), cuDNN on GPU (`cudnn`), XLA anywhere else and for what a kernel's
`supports` leaves out (`xla`); over several devices inside `spread`. Refuses a prefix without causality. Invariant: the kernel changes
how fast tokens get their vectors, never which (padding apart).
"""

from __future__ import annotations

import functools
from typing import Literal

import jax.numpy as jnp
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
    segment_ids: Int[Array, "b t"] | None = None,
    prefix: tuple[Float[Array, "p s k h"], Float[Array, "p s k h"]] | None = None,
    prefix_mask: Bool[Array, "p s"] | None = None,
    pieces: int = 1,
    chunk: int = QUERY_CHUNK,
    implementation: Implementation | None = None,
) -> Float[Array, "b t n h"]:
    """Grouped-query attention; query head n uses kv head n // (n / k).

    Tokens see tokens of their own row with the same segment id (None: all), causally where asked. With a prefix (b = p * g), rows
    r * g ... r * g + g - 1 also see every position of prefix row r where `prefix_mask` holds (all, if None); each of them is then one
    segment, 0 = padding and anything else valid. What padding gets is finite and means nothing. XLA takes `chunk` queries at a time.
    `pieces`: so many rows of the prefix that follow one another (without a prefix: of everything) are one sequence, to lie on as many
    devices. `implementation` None: the fastest that runs where the computation will. A mesh that is set (`jax.set_mesh`) says where; the
    kernel for TPU needs one as soon as arrays lie on several devices. A kernel that is named is taken unasked; off its device it is slow.
    ValueError for a prefix with causal=False.
    """
    if prefix is not None and not causal:
        raise ValueError(
            "causal = False: a prefix comes before its rows; leave causal True, or put the prefix into the rows"
        )
    if prefix is not None and segment_ids is not None:
        segment_ids = (segment_ids != 0).astype(jnp.int32)
    target = platform()
    kernel = {
        "splash": functools.partial(splash.attend, interpret=target != "tpu"),
        "cudnn": functools.partial(
            cudnn.attend, implementation="cudnn" if target == "gpu" else "xla"
        ),
        "xla": functools.partial(xla.attend, chunk=chunk),
    }[implementation or choose(target, q, k, prefix, pieces)]
    run = spread.attend if spread.fits(q, k, prefix, pieces) else spread.join
    return run(
        functools.partial(kernel, causal=causal), q, k, v, segment_ids, prefix, prefix_mask, pieces
    )


def choose(
    target: str,
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    prefix: tuple[Float[Array, "p s k h"], Float[Array, "p s k h"]] | None = None,
    pieces: int = 1,
) -> Implementation:
    """The kernel of the platform `target` where it can do the case, else XLA."""
    if (
        target == "tpu"
        and splash.supports(q)
        and (current_mesh() is None or spread.fits(q, k, prefix, pieces))
    ):
        return "splash"
    return "cudnn" if target == "gpu" and cudnn.supports(q, prefix) else "xla"
