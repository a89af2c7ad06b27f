"""The arrays of a batch, and sums and means over their masks.

Entry t of log-probs, masks and advantages belongs to token t itself, given all tokens before it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from paravt_jax.method.structure import Structure

Metrics = dict[str, Float[Array, ""]]


# Types are not checked: JAX also builds this tree with shapes or shardings as leaves, or with
# micro-batches as a further axis.
@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GRPOBatch:
    """One batch: p prompts with g rollouts each, group by group in b = p * g rows of t tokens."""

    rewards: Float[Array, "p g"]
    """`Rewards.total` of each rollout."""
    anchor_rewards: Float[Array, "p g"]
    """`Rewards.anchor` of each rollout."""
    valid: Bool[Array, "p g"]
    """False for rollouts that do not count."""
    compliant: Bool[Array, "p g"]
    """`Rewards.compliant`: rollouts whose tags the anchor `likelihood` rewards."""
    mask: Bool[Array, "p*g t"]
    """Generated tokens to train on. Log-probs of other tokens are ignored."""
    behaviour: Float[Array, "p*g t"]
    """Log-probs under the weights that sampled, as the engine computed them."""
    reference: Float[Array, "p*g t"]
    """Log-probs under the reference policy of the KL penalty."""
    structure: Structure
    """struct(o) of each row (`paravt_jax.method.structure`)."""
    proximal: Float[Array, "p*g t"] | None = None
    """Log-probs under the proximal policy, the weights at the start of the step; None in its first
    update, where they are the current ones."""
    current: Bool[Array, "p*g t"] | None = None
    """Tokens that the weights of the update drew; None: all of them. For the gaps between sampler
    and trainer only."""

    @property
    def trained(self) -> Bool[Array, "b t"]:
        """The generated tokens of valid rollouts."""
        return self.mask & self.valid.reshape(-1, 1)


class Totals(NamedTuple):
    """Denominators of the loss. Every micro-batch uses those of the whole batch."""

    tokens: Float[Array, ""]
    """Trained tokens."""
    structural: Float[Array, ""]
    """Tags and violations of the anchor `likelihood`."""
    tags: Float[Array, " k"]
    """Tokens of tags, of each of the k kinds (`paravt_jax.method.structure.TAGS`)."""


def masked_sum(x: Float[Array, "*s"], mask: Bool[Array, "*s"]) -> Float[Array, ""]:
    """Sum of x where mask. Other values, even NaN, reach neither the sum nor its gradient."""
    # x * mask would not do: NaN * 0 is NaN.
    return jnp.where(mask, x, 0.0).sum()


def masked_mean(
    x: Float[Array, "*s"], mask: Bool[Array, "*s"], total: Num[Array, ""] | None = None
) -> Float[Array, ""]:
    """Mean of x where mask; 0 if the mask is empty.

    Args:
        x: Values; outside the mask they may be anything.
        mask: The values that count.
        total: Denominator, if it is not the number of masked values.
    """
    return masked_sum(x, mask) / jnp.maximum(mask.sum() if total is None else total, 1)
