"""PARA-GRPO: from rewards of rollouts to a loss, as pure functions on arrays (REFERENCE 3).

    settings    hyperparameters and variants
    batch       the arrays of a batch, and masked means
    advantages  from rewards and KL to an advantage per token
    anchor      the four places where the format reward can act
    loss        the decoupled policy loss, and the whole loss

The loss and its gradient do not depend on padding, on the order of groups and of the rollouts in a
group, or on the split into micro-batches (with `Totals` of the whole batch).
"""

from paravt_jax.method.grpo.advantages import (
    advantages,
    has_signal,
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
    tag_counts,
    tag_likelihood,
)
from paravt_jax.method.grpo.batch import (
    GRPOBatch,
    Metrics,
    Totals,
    masked_mean,
    masked_sum,
)
from paravt_jax.method.grpo.loss import (
    batch_totals,
    behaviour_weight,
    clipped_loss,
    paravt_loss,
    policy_loss,
)
from paravt_jax.method.grpo.settings import (
    NORMALISATIONS,
    Anchor,
    GRPOSettings,
    Normalisation,
    NormalisationName,
)

__all__ = [
    "NORMALISATIONS",
    "Anchor",
    "GRPOBatch",
    "GRPOSettings",
    "Metrics",
    "Normalisation",
    "NormalisationName",
    "Totals",
    "advantages",
    "anchor_credit",
    "anchor_likelihood",
    "batch_totals",
    "behaviour_weight",
    "clipped_loss",
    "has_signal",
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
    "tag_counts",
    "tag_likelihood",
    "token_advantages",
    "varied",
]
