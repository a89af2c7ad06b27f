"""Attention: `attend` for sequences; `PagedCache` for new tokens of cached ones.

A token sees earlier tokens of its segment, and in a packed row the prompt of its group. The kernel
is Splash on TPU (`splash`; `flash` for packed rows), cuDNN on GPU (`triton` for packed rows), and
plain XLA (`xla`) elsewhere or for arrays that a kernel does not support. Over several devices,
kernels run inside `spread`. All kernels give valid tokens the same vectors; vectors of padding may
differ.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.attention import flash, splash, spread, triton, xla
from models.attention.paged import PagedCache, SharedPages
from models.attention.target import SAVED, RowLayout, platform
from models.attention.xla import TILE
from models.sharding import current_mesh

__all__ = [
    "SAVED",
    "TILE",
    "Implementation",
    "PagedCache",
    "RowLayout",
    "SharedPages",
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
    implementation: Implementation | None = None,
) -> Float[Array, "b t n h"]:
    """Compute grouped-query attention; query head i uses kv head i // (n / k).

    The outputs of padding are finite but meaningless. If a mesh is set (`jax.set_mesh`), its
    platform decides the kernel. On TPU a mesh must be set if arrays are sharded over devices.

    Args:
        q: queries.
        k: keys of the same rows.
        v: values of the same rows.
        layout: what each token sees; None: itself and earlier tokens of its row.
        implementation: the kernel; None chooses the fastest that supports the case. A named kernel
            also runs away from its device, slowly, for tests.

    Raises:
        ValueError: the layout contradicts itself or the mesh, or a named kernel does not support
            the case.
    """
    rows: RowLayout = jax.tree.map(jnp.asarray, layout or RowLayout())
    rows.check()
    target = platform()
    kernels = {
        "flash": functools.partial(flash.attend, interpret=target != "tpu"),
        "splash": functools.partial(splash.attend, interpret=target != "tpu"),
        "cudnn": functools.partial(_cudnn, implementation="cudnn" if target == "gpu" else "xla"),
        "triton": functools.partial(triton.attend, interpret=target != "gpu"),
        "xla": xla.attend,
    }
    name = implementation or choose(target, q, k, rows.pieces, rows.packed)
    if name != "xla" and rows.packed != (name in ("flash", "triton")):
        raise ValueError(
            f"implementation = {name!r}: 'flash' and 'triton' are for packed rows; leave it None"
        )
    if spread.fits(q, k, rows.pieces):
        return spread.attend(kernels[name], q, k, v, rows)
    if rows.pieces > 1:
        raise ValueError(
            f"layout: {rows.pieces} pieces per sequence, {len(q)} in all; set a mesh with a device "
            "for each, over which query and kv heads divide"
        )
    return kernels[name](q, k, v, rows)


def choose(
    target: str,
    q: Float[Array | jax.ShapeDtypeStruct, "b t n h"],
    k: Float[Array | jax.ShapeDtypeStruct, "b t k h"],
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
    if target == "gpu" and not packed and _cudnn_supports(q):
        return "cudnn"
    return "xla"


def _cudnn_supports(q: Float[Array | jax.ShapeDtypeStruct, "b t n h"]) -> bool:
    """Return whether cuDNN can take these arrays.

    It needs a 16-bit type and heads of at most 128, a multiple of 8. Gradients under a mask also
    need even lengths.
    """
    t, h = q.shape[1], q.shape[3]
    return q.dtype in (jnp.bfloat16, jnp.float16) and h <= 128 and h % 8 == 0 and t % 2 == 0


def _cudnn(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    layout: RowLayout,
    implementation: Literal["cudnn", "xla"],
) -> Float[Array, "b t n h"]:
    """Compute `attend` with cuDNN, or away from a GPU with the same call in XLA."""
    mask = None
    if layout.segments is not None:
        mask = (layout.segments[:, :, None] == layout.segments[:, None])[:, None]
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=layout.causal, implementation=implementation
    )
