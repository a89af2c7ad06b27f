"""Attention on GPU: cuDNN's flash attention, through `jax.nn.dot_product_attention`.

A prefix is joined to the keys of its row. Away from a GPU the same call runs in XLA, for tests.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from models.attention.target import RowLayout


def supports(
    q: Float[Array | jax.ShapeDtypeStruct, "b t n h"],
    prefix: tuple[Array | jax.ShapeDtypeStruct, Array | jax.ShapeDtypeStruct] | None,
) -> bool:
    """Return whether the kernel can take these arrays.

    It needs a 16-bit type and heads of at most 128, a multiple of 8. Gradients under a mask also
    need even lengths.
    """
    t, h = q.shape[1], q.shape[3]
    even = t % 2 == 0 and (prefix is None or prefix[0].shape[1] % 2 == 0)
    return q.dtype in (jnp.bfloat16, jnp.float16) and h <= 128 and h % 8 == 0 and even


def attend(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    prefix: tuple[Float[Array, "b s k h"], Float[Array, "b s k h"]] | None,
    layout: RowLayout,
    implementation: Literal["cudnn", "xla"],
) -> Float[Array, "b t n h"]:
    """Compute `attention.attend` on this kernel, which has no packed rows."""
    mask, causal = None, layout.causal
    if layout.segments is not None:
        mask = layout.segments[:, :, None] == layout.segments[:, None]
    if prefix is not None:
        mask = _prefix_mask(q, prefix, layout.prefix_mask, mask)
        # The mask is causal already. The kernel's own would count from the first prefix position.
        causal = False
        k = jnp.concatenate([prefix[0], k], axis=1)
        v = jnp.concatenate([prefix[1], v], axis=1)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=None if mask is None else mask[:, None],
        is_causal=causal,
        implementation=implementation,
    )


def _prefix_mask(
    q: Float[Array, "b t n h"],
    prefix: tuple[Float[Array, "b s k h"], Float[Array, "b s k h"]],
    prefix_mask: Bool[Array | np.ndarray, "b s"] | None,
    same_segment: Bool[Array, "b t t"] | None,
) -> Bool[Array, "b t s_plus_t"]:
    """Return which of [prefix, own row] each query sees."""
    b, t = q.shape[:2]
    s = prefix[0].shape[1]
    valid = jnp.ones((b, s), bool) if prefix_mask is None else prefix_mask
    own = jnp.broadcast_to(jnp.tri(t, dtype=bool)[None], (b, t, t))
    if same_segment is not None:
        own = own & same_segment
    return jnp.concatenate([jnp.broadcast_to(valid[:, None], (b, t, s)), own], axis=-1)
