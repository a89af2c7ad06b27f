"""Batches of PARA-GRPO that hold only what the policy loss reads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from paravt_jax.method.grpo.batch import GRPOBatch
from paravt_jax.method.structure import Structure

Matrix = jax.Array | np.ndarray


def token_batch(behaviour: Matrix, mask: Matrix, proximal: Matrix | None = None) -> GRPOBatch:
    """Rows of tokens to train on, each a rollout of its own, without rewards and tags."""
    rows = len(mask)
    nothing = jnp.zeros((1, rows))
    everything = jnp.ones((1, rows), bool)
    no_tag = jnp.zeros((rows, 1), jnp.int32)
    return GRPOBatch(
        mask=jnp.asarray(mask),
        behaviour=jnp.asarray(behaviour),
        reference=jnp.asarray(behaviour),
        structure=Structure(no_tag, no_tag.astype(jnp.int8), no_tag.astype(bool)),
        rewards=nothing,
        anchor_rewards=nothing,
        valid=everything,
        compliant=everything,
        proximal=None if proximal is None else jnp.asarray(proximal),
    )
