"""The clipped decoupled loss (REFERENCE 3, step 4) and the whole loss of a batch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paravt_jax.method.grpo.anchor import anchor_likelihood, structural_tokens
from paravt_jax.method.grpo.batch import GRPOBatch, Metrics, Totals, masked_mean
from paravt_jax.method.grpo.settings import GRPOSettings


@dataclasses.dataclass(frozen=True)
class ClipBounds:
    """Bounds of the policy ratio: [1 - lower, 1 + (upper or lower)]. `dual` bounds what a token of
    negative advantage costs to dual * |A|, however large its ratio; None for no such bound.

    Training makes one update per batch, where none of them acts. They stay because the loss is held
    against the reference's tables, most of which have them.
    """

    lower: float = 0.2
    upper: float | None = None
    dual: float | None = None


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
    """Decoupled PPO (REFERENCE 3, step 4): the clipped loss against the proximal policy, weighted by
    how much likelier that policy found the token than the sampler did.

    The proximal policy is the one at the start of a batch. No gradient flows through it, nor through
    the weight, which is 0 above `behaviour_cap`. A step that makes one update per batch passes the
    current log-probs as `proximal`: the ratio is then 1, and no clip acts. The sum is divided by
    `tokens`, by default the number of masked tokens; capped tokens stay in the denominator.
    """
    proximal = jax.lax.stop_gradient(proximal)
    log_ratio = jnp.where(mask, logprobs - proximal, 0.0)
    advantages = jnp.where(mask, advantages, 0.0)
    if settings.ratio == "sequence":
        log_ratio, advantages = _over_sequence(log_ratio, mask), _over_sequence(advantages, mask)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(
        ratio, 1 - clip.lower, 1 + (clip.lower if clip.upper is None else clip.upper)
    )
    loss = jnp.maximum(-advantages * ratio, -advantages * clipped)
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
    """exp(proximal - behaviour) where mask, without gradient; 0 above `behaviour_cap` (REFERENCE 3, step 4)."""
    weight = jnp.exp(jnp.where(mask, proximal - behaviour, 0.0))
    kept = weight <= (jnp.inf if settings.behaviour_cap is None else settings.behaviour_cap)
    return jax.lax.stop_gradient(jnp.where(kept, weight, 0.0))


def _over_sequence(x: Float[Array, "b t"], mask: Bool[Array, "b t"]) -> Float[Array, "b t"]:
    """Each row's mean over its masked tokens, on every token; x is 0 outside the mask."""
    return jnp.broadcast_to(
        x.sum(1, keepdims=True) / jnp.maximum(mask.sum(1, keepdims=True), 1), x.shape
    )


def batch_totals(batch: GRPOBatch) -> Totals:
    """The denominators of a whole batch, for losses computed in parts."""
    tags, violations = structural_tokens(batch)
    return Totals(
        batch.trained.sum().astype(jnp.float32), (tags | violations).sum().astype(jnp.float32)
    )


def paravt_loss(
    logprobs: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    batch: GRPOBatch,
    settings: GRPOSettings,
    totals: Totals | None = None,
    gamma: float = 0.3,
) -> tuple[Float[Array, ""], Metrics]:
    """The whole loss of a batch, and its metrics. `advantages` come from the function of that name, once a step; `gamma` is
    `RewardSettings.gamma`, which acts here under `likelihood`.

    With `totals` of a whole batch, losses and metrics of its parts add up to the whole's.
    """
    totals = batch_totals(batch) if totals is None else totals
    # One update per batch: the proximal policy is the current one.
    loss, metrics = policy_loss(
        logprobs, logprobs, batch.behaviour, advantages, batch.trained, settings, totals.tokens
    )
    if settings.anchor == "likelihood":
        weight = behaviour_weight(logprobs, batch.behaviour, batch.trained, settings)
        likelihood = anchor_likelihood(logprobs, weight, batch, gamma, totals.structural)
        metrics["anchor_likelihood"] = likelihood
        loss = loss - settings.anchor_weight * likelihood
    return loss, metrics | {"loss": loss}
