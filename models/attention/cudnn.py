"""Attention on GPU: cuDNN's flash attention, through `jax.nn.dot_product_attention`.

Owns the masks that the kernel needs. A shared prefix is repeated for every row, since the kernel knows no shared keys. Away from a GPU
the same call runs in XLA, for tests. Refuses nothing: `supports` is asked first. Invariant: valid tokens get what
`xla` gives them.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def supports(q: Float[Array, "b t n h"], prefix: tuple[Array, Array] | None) -> bool:
    """Whether the kernel can do the case: 16 bits, heads of at most 128 in eights, and, for gradients under a mask, even lengths."""
    t, h = q.shape[1], q.shape[3]
    even = t % 2 == 0 and (prefix is None or prefix[0].shape[1] % 2 == 0)
    return q.dtype in (jnp.bfloat16, jnp.float16) and h <= 128 and h % 8 == 0 and even


def attend(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    *,
    causal: bool,
    segment_ids: Int[Array, "b t"] | None,
    prefix: tuple[Float[Array, "p s k h"], Float[Array, "p s k h"]] | None,
    prefix_mask: Bool[Array, "p s"] | None,
    implementation: Literal["cudnn", "xla"],
) -> Float[Array, "b t n h"]:
    """`attention.attend` on this kernel."""
    mask = None if segment_ids is None else segment_ids[:, :, None] == segment_ids[:, None]
    if prefix is not None:
        (b, t), (p, s) = q.shape[:2], prefix[0].shape[:2]
        valid = jnp.ones((p, s), bool) if prefix_mask is None else prefix_mask
        prefix_k, prefix_v, valid = (jnp.repeat(x, b // p, axis=0) for x in (*prefix, valid))
        k, v = jnp.concatenate([prefix_k, k], axis=1), jnp.concatenate([prefix_v, v], axis=1)
        # The kernel's own causal mask would start at the prefix.
        own = jnp.tri(t, dtype=bool) & (True if mask is None else mask)
        mask = jnp.concatenate(
            [jnp.broadcast_to(valid[:, None], (b, t, s)), jnp.broadcast_to(own, (b, t, t))], axis=-1
        )
        causal = False
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=None if mask is None else mask[:, None],
        is_causal=causal,
        implementation=implementation,
    )
