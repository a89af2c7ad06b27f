"""The decoupled policy loss and the whole loss of a batch."""

from __future__ import annotations

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


def policy_loss(
    logprobs: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    batch: GRPOBatch,
    settings: GRPOSettings,
    tokens: Float[Array, ""] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Compute the loss of decoupled PPO.

    The ratio is taken against the proximal policy (the weights at the start of the step) and
    clipped. Each token's loss is weighted by its probability under the proximal policy divided by
    that under the sampling weights. No gradient flows through the proximal policy or the weight.
    In the first update of a step, the proximal policy is the current one: the ratio is 1, and no
    clip acts.

    Args:
        logprobs: Log-probs under the current policy.
        advantages: Advantages of all tokens.
        batch: The tokens to train on, with log-probs of the proximal policy and the sampler.
        settings: The kind of ratio, its clips, and the cap of the weight.
        tokens: Denominator of the loss; the number of trained tokens by default. Capped tokens
            count in it, although their loss is 0.

    Returns:
        The loss, and metrics: the share of capped tokens, |proximal - behaviour| summed over
        `batch.current` and divided by `tokens`, and the mean and largest weight after the cap;
        after the first update also those of `_ratio_metrics`.
    """
    mask = batch.trained
    proximal = logprobs if batch.proximal is None else batch.proximal
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
    loss = clipped_loss(ratio, advantages, settings)
    weight = behaviour_weight(proximal, batch.behaviour, mask, settings)
    tokens = mask.sum(dtype=jnp.float32) if tokens is None else tokens
    compared = mask if batch.current is None else mask & batch.current
    metrics = {
        "capped_fraction": masked_mean((weight == 0).astype(jnp.float32), mask, tokens),
        "behaviour_gap": masked_mean(jnp.abs(proximal - batch.behaviour), compared, tokens),
        "behaviour_weight": masked_mean(weight, mask, tokens),
        "behaviour_weight_max": jnp.where(mask, weight, 0.0).max(),
    }
    if batch.proximal is not None:
        metrics |= _ratio_metrics(ratio, advantages, mask, settings, tokens)
    return masked_mean(loss * weight, mask, tokens), metrics


def clipped_loss(
    ratio: Float[Array, "b t"], advantages: Float[Array, "b t"], settings: GRPOSettings
) -> Float[Array, "b t"]:
    """Return the loss of each token: -A * ratio, with clips of the ratio.

    The clip limits what is gained by a token, never what it costs: of the clipped and the unclipped
    loss, the larger one counts. A token of negative advantage costs more the likelier it has
    become, without bound unless there is a dual clip (arXiv:1912.09729).

    Args:
        ratio: Probability of each token under the current policy over the proximal one.
        advantages: Advantages of all tokens.
        settings: The clips.
    """
    clipped = jnp.clip(ratio, 1 - settings.clip, 1 + settings.clip_above)
    loss = jnp.maximum(-advantages * ratio, -advantages * clipped)
    if settings.dual_clip is not None:
        loss = jnp.minimum(loss, settings.dual_clip * jnp.abs(advantages))
    return loss


def _ratio_metrics(
    ratio: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    settings: GRPOSettings,
    tokens: Float[Array, ""] | None,
) -> Metrics:
    """Mean and largest ratio, and the shares of tokens whose loss the clips change.

    `clip_fraction` counts tokens where the clip of the ratio acts, which gives them no gradient,
    and `dual_clip_fraction` those where the dual clip does.
    """

    def share(chosen: Bool[Array, "b t"]) -> Float[Array, ""]:
        return masked_mean(chosen.astype(jnp.float32), mask, tokens)

    # The loss falls with the ratio where A > 0, and rises with it where A < 0.
    too_high = (advantages > 0) & (ratio > 1 + settings.clip_above)
    too_low = (advantages < 0) & (ratio < 1 - settings.clip)
    metrics = {
        "ratio_mean": masked_mean(ratio, mask, tokens),
        "ratio_max": jnp.where(mask, ratio, 0.0).max(),
        "clip_fraction": share(too_high | too_low),
    }
    if settings.dual_clip is not None:
        too_costly = (advantages < 0) & (ratio > settings.dual_clip)
        metrics["dual_clip_fraction"] = share(too_costly)
    return metrics


def behaviour_weight(
    proximal: Float[Array, "b t"],
    behaviour: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    settings: GRPOSettings,
) -> Float[Array, "b t"]:
    """Return the importance weight exp(proximal - behaviour) of each token, without gradient.

    A weight above `behaviour_cap` becomes 0, so the token is left out, not clipped, as
    in the release.
    """
    weight = jnp.exp(jnp.where(mask, proximal - behaviour, 0.0))
    cap = jnp.inf if settings.behaviour_cap is None else settings.behaviour_cap
    return jax.lax.stop_gradient(jnp.where(weight <= cap, weight, 0.0))


def _row_means(x: Float[Array, "b t"], mask: Bool[Array, "b t"]) -> Float[Array, "b t"]:
    """Replace every value by its row's mean over the mask. x has to be 0 outside the mask."""
    means = x.sum(1, keepdims=True) / jnp.maximum(mask.sum(1, keepdims=True), 1)
    return jnp.broadcast_to(means, x.shape)


def batch_totals(batch: GRPOBatch) -> Totals:
    """Return the denominators of a whole batch, for a loss computed by micro-batches."""
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
    """Return the whole loss of a batch: policy loss, and the anchor `likelihood` if the recipe uses
    it.

    Args:
        logprobs: Log-probs under the current policy.
        advantages: Result of `advantages`, computed once per step.
        batch: The batch, or a micro-batch.
        settings: The recipe's variant of GRPO.
        totals: Denominators of the whole batch, with which losses and metrics of its micro-batches
            add up to its own (of `ratio_max`, the largest counts). By default, `batch` is the
            whole batch.
        gamma: `RewardSettings.gamma`, the penalty for violations under `likelihood`.

    Returns:
        The loss, and metrics with the loss among them.
    """
    totals = batch_totals(batch) if totals is None else totals
    loss, metrics = policy_loss(logprobs, advantages, batch, settings, totals.tokens)
    if settings.anchor == "likelihood":
        # No ratio here: the weight corrects from the sampling weights to the current ones at once.
        weight = behaviour_weight(logprobs, batch.behaviour, batch.trained, settings)
        likelihood = anchor_likelihood(logprobs, weight, batch, gamma, totals.structural)
        metrics["anchor_likelihood"] = likelihood
        loss = loss - settings.anchor_weight * likelihood
    metrics |= tag_likelihood(logprobs, batch, totals.tags)
    return loss, metrics | {"loss": loss}
