"""PARA-GRPO: from rewards of rollouts to a loss, as pure functions on arrays.

    settings    hyperparameters and variants
    batch       the arrays of a batch, and masked means
    advantages  from rewards and KL to an advantage per token
    anchor      the four places where the format reward can act
    loss        the decoupled policy loss, and the whole loss

The loss and its gradient do not depend on padding, on the order of groups and of the rollouts in a
group, or on the split into micro-batches (with `Totals` of the whole batch).
"""

from paravt_jax.method.grpo.advantages import advantages, has_signal
from paravt_jax.method.grpo.batch import GRPOBatch, Metrics, Totals, masked_mean
from paravt_jax.method.grpo.loss import batch_totals, paravt_loss
from paravt_jax.method.grpo.settings import GRPOSettings

__all__ = [
    "GRPOBatch",
    "GRPOSettings",
    "Metrics",
    "Totals",
    "advantages",
    "batch_totals",
    "has_signal",
    "masked_mean",
    "paravt_loss",
]
