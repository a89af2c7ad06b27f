"""Attention: `attend` for sequences; `DenseCache` and `PagedCache` for one new token per row.

A token sees earlier tokens of its segment, and tokens before them: the valid positions of its row's
prefix, or the prompt of its group at the beginning of a packed row. The kernel is
Splash on TPU (`splash`; `flash` for packed rows), cuDNN on GPU (`cudnn`; `triton` for packed rows),
and plain XLA (`xla`) elsewhere or for arrays that a kernel does not support. Over several devices,
kernels run inside `spread`. All kernels give valid tokens the same vectors; vectors of padding may
differ.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.attention import cudnn, flash, splash, spread, triton, xla
from models.attention.cache import DenseCache, Shared
from models.attention.paged import PagedCache
from models.attention.target import SAVED, RowLayout, platform
from models.attention.xla import QUERY_CHUNK
from models.sharding import current_mesh

__all__ = [
    "QUERY_CHUNK",
    "SAVED",
    "DenseCache",
    "Implementation",
    "PagedCache",
    "RowLayout",
    "Shared",
    "attend",
    "choose",
    "platform",
]

Implementation = Literal["flash", "splash", "cudnn", "triton", "xla"]


@jax.named_scope("attention")
def attend(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    layout: RowLayout | None = None,
    prefix: tuple[Float[Array, "b s k h"], Float[Array, "b s k h"]] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "b t n h"]:
    """Compute grouped-query attention; query head i uses kv head i // (n / k).

    Behind a prefix of s = 3 positions, the t = 2 tokens of a row see (#):

                  prefix   row
        token 0   # # #    # .
        token 1   # # #    # #

    The outputs of padding are finite but meaningless. If a mesh is set (`jax.set_mesh`), its
    platform decides the kernel. On TPU a mesh must be set if arrays are sharded over devices.

    Args:
        q: queries.
        k: keys of the same rows.
        v: values of the same rows.
        layout: what each token sees; None: itself and earlier tokens of its row.
        prefix: keys and values of tokens before each row.
        implementation: the kernel; None chooses the fastest that supports the case. A named kernel
            also runs away from its device, slowly, for tests.

    Raises:
        ValueError: the layout contradicts itself, the prefix or the mesh, or a named kernel does
            not support the case.
    """
    rows: RowLayout = jax.tree.map(jnp.asarray, layout or RowLayout())
    rows.check(prefix is not None)
    if rows.segments is not None and prefix is not None:
        rows = dataclasses.replace(rows, segments=(rows.segments != 0).astype(jnp.int32))
    target = platform()
    kernels = {
        "flash": functools.partial(flash.attend, interpret=target != "tpu"),
        "splash": functools.partial(splash.attend, interpret=target != "tpu"),
        "cudnn": functools.partial(
            cudnn.attend, implementation="cudnn" if target == "gpu" else "xla"
        ),
        "triton": functools.partial(triton.attend, interpret=target != "gpu"),
        "xla": xla.attend,
    }
    name = implementation or choose(target, q, k, prefix, rows.pieces, rows.packed)
    if name != "xla" and rows.packed != (name in ("flash", "triton")):
        raise ValueError(
            f"implementation = {name!r}: 'flash' and 'triton' are for packed rows; leave it None"
        )
    if spread.fits(q, k, rows.pieces):
        return spread.attend(kernels[name], q, k, v, prefix, rows)
    if rows.pieces > 1:
        raise ValueError(
            f"layout: {rows.pieces} pieces per sequence, {len(q)} in all; set a mesh with a device "
            "for each, over which query and kv heads divide"
        )
    return kernels[name](q, k, v, prefix, rows)


def choose(
    target: str,
    q: Float[Array | jax.ShapeDtypeStruct, "b t n h"],
    k: Float[Array | jax.ShapeDtypeStruct, "b t k h"],
    prefix: tuple[Array | jax.ShapeDtypeStruct, Array | jax.ShapeDtypeStruct] | None = None,
    pieces: int = 1,
    packed: bool = False,
) -> Implementation:
    """Return the kernel of the platform `target` if it supports these arrays, else XLA."""
    # The compiler cannot shard kernels in Pallas: over several devices they need `spread`.
    whole_or_spread = current_mesh() is None or spread.fits(q, k, pieces)
    if target == "tpu" and splash.supports(q) and whole_or_spread:
        return "flash" if packed else "splash"
    if target == "gpu" and packed and triton.supports(q) and whole_or_spread:
        return "triton"
    if target == "gpu" and not packed and cudnn.supports(q, prefix):
        return "cudnn"
    return "xla"
