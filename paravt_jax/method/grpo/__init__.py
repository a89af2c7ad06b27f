"""PARA-GRPO: from what rollouts earned to a loss, as pure functions on arrays.

Owns the algorithm of REFERENCE 3, steps 1 to 4: `settings`, `batch` (the arrays), `advantages`, `anchor` (its four places), `loss`.
Refuses text, models and optimisers. Invariant: padding, the order of groups and of rollouts inside a group, and how rows are split
over micro-batches (with `Totals` of the whole batch) change neither loss nor gradient.
"""

from paravt_jax.method.grpo.advantages import (
    advantages,
    kl_penalty,
    normalise,
    normalise_tokens,
    shape_rewards,
    token_advantages,
    varied,
)
from paravt_jax.method.grpo.anchor import (
    anchor_credit,
    anchor_likelihood,
    structural_tokens,
    structural_weights,
)
from paravt_jax.method.grpo.batch import GRPOBatch, Metrics, Totals, masked_mean, masked_sum
from paravt_jax.method.grpo.loss import (
    ClipBounds,
    batch_totals,
    behaviour_weight,
    paravt_loss,
    policy_loss,
)
from paravt_jax.method.grpo.settings import Anchor, GRPOSettings, Normalisation

__all__ = [
    "Anchor",
    "ClipBounds",
    "GRPOBatch",
    "GRPOSettings",
    "Metrics",
    "Normalisation",
    "Totals",
    "advantages",
    "anchor_credit",
    "anchor_likelihood",
    "batch_totals",
    "behaviour_weight",
    "kl_penalty",
    "masked_mean",
    "masked_sum",
    "normalise",
    "normalise_tokens",
    "paravt_loss",
    "policy_loss",
    "shape_rewards",
    "structural_tokens",
    "structural_weights",
    "token_advantages",
    "varied",
]
