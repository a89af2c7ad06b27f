"""The decoupled policy loss (REFERENCE 3, step 4) and the whole loss of a batch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paravt_jax.method.grpo.anchor import (
    anchor_likelihood,
    structural_tokens,
    tag_counts,
    tag_likelihood,
)
from paravt_jax.method.grpo.batch import GRPOBatch, Metrics, Totals, masked_mean
from paravt_jax.method.grpo.settings import GRPOSettings


@dataclasses.dataclass(frozen=True)
class ClipBounds:
    """Bounds of the policy ratio.

    They do not act in training, which makes one update per batch, so that the ratio is 1. They are
    needed to compare the loss with the reference's tables, most of which use them.
    """

    lower: float = 0.2
    """The ratio is clipped below at 1 - lower."""
    upper: float | None = None
    """The ratio is clipped above at 1 + upper; None for 1 + lower."""
    dual: float | None = None
    """A token of negative advantage A costs at most dual * |A|; None for no such bound."""


def policy_loss(
    logprobs: Float[Array, "b t"],
    proximal: Float[Array, "b t"],
    behaviour: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    settings: GRPOSettings,
    tokens: Float[Array, ""] | None = None,
    clip: ClipBounds = ClipBounds(),
) -> tuple[Float[Array, ""], Metrics]:
    """Decoupled PPO (REFERENCE 3, step 4).

    The ratio is taken against the proximal policy (the weights at the start of the batch) and
    clipped. Each token's loss is weighted by its probability under the proximal policy divided by
    that under the sampling weights. No gradient flows through the proximal policy or the weight. A
    step with one update per batch passes its current log-probs as `proximal`; the ratio is then 1
    and no clip acts.

    Args:
        logprobs: Log-probs under the current policy.
        proximal: Log-probs under the proximal policy.
        behaviour: Log-probs under the weights that sampled.
        advantages: Advantages of all tokens.
        mask: Tokens to train on.
        settings: The kind of ratio and the cap of the weight.
        tokens: Denominator of the loss; the number of masked tokens by default. Capped tokens
            count in it, although their loss is 0.
        clip: Bounds of the ratio.

    Returns:
        The loss, and metrics: the share of capped tokens and the mean |proximal - behaviour|.
    """
    proximal = jax.lax.stop_gradient(proximal)
    # Log-probs outside the mask may be NaN. They are replaced before exp: a NaN that `where`
    # discards afterwards would still make the gradient NaN.
    log_ratio = jnp.where(mask, logprobs - proximal, 0.0)
    advantages = jnp.where(mask, advantages, 0.0)
    # GSPO: exp of the mean log-ratio is the geometric mean of the ratios.
    if settings.ratio == "sequence":
        log_ratio = _row_means(log_ratio, mask)
        advantages = _row_means(advantages, mask)
    ratio = jnp.exp(log_ratio)
    upper = clip.lower if clip.upper is None else clip.upper
    clipped = jnp.clip(ratio, 1 - clip.lower, 1 + upper)
    # The larger loss of the two: clipping limits the gain from a token, never its cost.
    loss = jnp.maximum(-advantages * ratio, -advantages * clipped)
    # A token of negative advantage costs more the likelier it has become. Limit that.
    if clip.dual is not None:
        loss = jnp.minimum(loss, clip.dual * jnp.abs(advantages))
    weight = behaviour_weight(proximal, behaviour, mask, settings)
    metrics = {
        "capped_fraction": masked_mean((weight == 0).astype(jnp.float32), mask, tokens),
        "behaviour_gap": masked_mean(jnp.abs(proximal - behaviour), mask, tokens),
    }
    return masked_mean(loss * weight, mask, tokens), metrics


def behaviour_weight(
    proximal: Float[Array, "b t"],
    behaviour: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    settings: GRPOSettings,
) -> Float[Array, "b t"]:
    """Importance weight exp(proximal - behaviour) of each token, without gradient.

    A weight above `behaviour_cap` becomes 0, so the token is left out, not clipped (REFERENCE 3,
    step 4).
    """
    weight = jnp.exp(jnp.where(mask, proximal - behaviour, 0.0))
    cap = jnp.inf if settings.behaviour_cap is None else settings.behaviour_cap
    return jax.lax.stop_gradient(jnp.where(weight <= cap, weight, 0.0))


def _row_means(x: Float[Array, "b t"], mask: Bool[Array, "b t"]) -> Float[Array, "b t"]:
    """Replace every value by its row's mean over the mask. x has to be 0 outside the mask."""
    means = x.sum(1, keepdims=True) / jnp.maximum(mask.sum(1, keepdims=True), 1)
    return jnp.broadcast_to(means, x.shape)


def batch_totals(batch: GRPOBatch) -> Totals:
    """The denominators of a whole batch, for a loss computed by micro-batches."""
    tags, violations = structural_tokens(batch)
    return Totals(
        tokens=batch.trained.sum().astype(jnp.float32),
        structural=(tags | violations).sum().astype(jnp.float32),
        tags=tag_counts(batch),
    )


def paravt_loss(
    logprobs: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    batch: GRPOBatch,
    settings: GRPOSettings,
    totals: Totals | None = None,
    gamma: float = 0.3,
) -> tuple[Float[Array, ""], Metrics]:
    """The whole loss of a batch: policy loss, and the anchor `likelihood` if the recipe uses it.

    Args:
        logprobs: Log-probs under the current policy.
        advantages: Result of `advantages`, computed once per step.
        batch: The batch, or a part of it.
        settings: The recipe's variant of GRPO.
        totals: Denominators of the whole batch, with which losses and metrics of the parts add up
            to those of the whole. By default, `batch` is the whole batch.
        gamma: `RewardSettings.gamma`, the penalty for violations under `likelihood`.

    Returns:
        The loss, and metrics with the loss among them.
    """
    totals = batch_totals(batch) if totals is None else totals
    # With one update per batch, the proximal policy is the current one.
    loss, metrics = policy_loss(
        logprobs, logprobs, batch.behaviour, advantages, batch.trained, settings, totals.tokens
    )
    if settings.anchor == "likelihood":
        weight = behaviour_weight(logprobs, batch.behaviour, batch.trained, settings)
        likelihood = anchor_likelihood(logprobs, weight, batch, gamma, totals.structural)
        metrics["anchor_likelihood"] = likelihood
        loss = loss - settings.anchor_weight * likelihood
    metrics |= tag_likelihood(logprobs, batch, totals.tags)
    return loss, metrics | {"loss": loss}
