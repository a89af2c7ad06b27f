"""Advantages of all tokens, from rewards and log-probs (docs/reference.md, 3, steps 1 to 3).

They are computed once per step, without gradient. Arrays have b rows of t tokens, or p prompts
(groups) with g rollouts each.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paravt_jax.method.grpo.anchor import anchor_credit
from paravt_jax.method.grpo.batch import GRPOBatch, Metrics, masked_mean
from paravt_jax.method.grpo.settings import (
    NORMALISATIONS,
    GRPOSettings,
    KLKind,
    Level,
    Normalisation,
)

# Added to standard deviations.
EPSILON = 1e-5


def shape_rewards(rewards: Float[Array, "p g"], settings: GRPOSettings) -> Float[Array, "p g"]:
    """Return clip((R - bias) * scaling, -clip, clip)."""
    shaped = (rewards - settings.reward_bias) * settings.reward_scaling
    if settings.reward_clip is None:
        return shaped
    return jnp.clip(shaped, -settings.reward_clip, settings.reward_clip)


def _axis(level: Level) -> int | None:
    """Return the axis of [groups, members] for statistics of each group, or None for the whole
    batch."""
    return 1 if level == "group" else None


def varied(
    x: Float[Array, "p n"], mask: Bool[Array, "p n"], level: Level = "group"
) -> Bool[Array, "p 1"] | Bool[Array, "1 1"]:
    """Return whether the masked values of each group, or of the batch, are not all equal."""
    axis = _axis(level)
    largest = jnp.where(mask, x, -jnp.inf).max(axis, keepdims=True)
    smallest = jnp.where(mask, x, jnp.inf).min(axis, keepdims=True)
    return largest > smallest


def normalise(
    x: Float[Array, "p n"], mask: Bool[Array, "p n"], how: Normalisation, epsilon: float = EPSILON
) -> Float[Array, "p n"]:
    """Return (x - mean) / (std + epsilon) of the masked values, and 0 elsewhere.

    The std is that of the centred values, divided by n - 1.

    Args:
        x: Values, one row per group. Values outside the mask may be anything.
        mask: The values that count.
        how: Whether mean and std are taken per group, over the batch, or not at all.
        epsilon: Added to the std.
    """
    values = jnp.where(mask, x, 0.0)
    centred = values
    if how.mean != "none":
        axis = _axis(how.mean)
        n = mask.sum(axis, keepdims=True)
        total = values.sum(axis, keepdims=True)
        if how.leave_one_out:
            mean = (total - values) / jnp.maximum(n - 1, 1)
        else:
            mean = total / jnp.maximum(n, 1)
        # Equal values become exactly 0. Otherwise the rounding error of their mean, divided by
        # epsilon, would look like an advantage.
        centred = jnp.where(mask & varied(x, mask, how.mean), x - mean, 0.0)
    if how.std == "none":
        return centred
    axis = _axis(how.std)
    n = mask.sum(axis, keepdims=True)
    std = jnp.sqrt((centred**2).sum(axis, keepdims=True) / jnp.maximum(n - 1, 1))
    return centred / (std + epsilon)


def kl_penalty(
    logprobs: Float[Array, "b t"],
    base: Float[Array, "b t"],
    kind: KLKind = "k1",
    clamp: float | None = 10.0,
) -> Float[Array, "b t"]:
    """Estimate KL(policy || base) per token from the token that was sampled.

    With d = logprobs - base, k1 is d, k2 is d^2 / 2, and k3 is exp(-d) - 1 + d.

    Args:
        logprobs: Log-probs under the policy.
        base: Log-probs under the reference policy.
        kind: The estimator.
        clamp: Bound on the estimate in both directions; None for no bound.
    """
    d = logprobs - base
    if kind == "k1":
        kl = d
    elif kind == "k2":
        kl = d**2 / 2
    elif kind == "k3":
        kl = jnp.exp(-d) - 1 + d
    else:
        raise ValueError(f"kl kind = {kind!r}: unknown; give k1, k2 or k3")
    return kl if clamp is None else jnp.clip(kl, -clamp, clamp)


def token_advantages(
    rewards: Float[Array, " b"],
    kl: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    coefficient: float,
) -> Float[Array, "b t"]:
    """Sum of token rewards from each generated token to the end (no discount, no critic).

    A token costs its penalty p = coefficient * kl. The rollout's reward is added at its last
    generated token, even if tool tokens follow, so that no rollout loses its reward, as
    some do in the release.

        mask        0     1       1     0     1
        reward            -p1     -p2         -p4 + R
        advantage   0   R-p1-p2-p4  R-p2-p4  0  R-p4

    Args:
        rewards: Normalised reward of each row's rollout.
        kl: KL estimate per token.
        mask: Generated tokens; others get 0.
        coefficient: Weight of the KL.
    """
    penalties = jnp.where(mask, -coefficient * kl, 0.0)
    # A cumulative sum from the right.
    onward = jnp.flip(jnp.cumsum(jnp.flip(penalties, 1), axis=1), 1)
    return jnp.where(mask, onward + rewards[:, None], 0.0)


def normalise_tokens(
    advantages: Float[Array, "b t"],
    rewards: Float[Array, "p g"],
    batch: GRPOBatch,
    how: Normalisation,
    epsilon: float = EPSILON,
) -> Float[Array, "b t"]:
    """Apply `normalise` over the trained tokens of the batch, or of each group.

    If all rollouts of a group (or of the batch) have equal rewards, the advantages consist of the
    small KL penalty only. Then only the mean is subtracted: divided by its own std, this noise
    would weigh as much as a reward, as it does in the release.

    Args:
        advantages: Advantages of all tokens.
        rewards: Normalised rewards, from which the advantages were made.
        batch: The trained tokens.
        how: Whether mean and std are taken per group, over the batch, or not at all.
        epsilon: Added to the std.
    """
    mask = batch.trained
    # One row of values for each group, or one for the whole batch.
    rows = len(rewards) if "group" in (how.mean, how.std) else 1
    values = advantages.reshape(rows, -1)
    members = mask.reshape(rows, -1)
    normed = jnp.where(
        varied(rewards, batch.valid, how.std),
        normalise(values, members, how, epsilon),
        normalise(values, members, how._replace(std="none")),
    )
    return normed.reshape(mask.shape)


def compute_advantages(
    batch: GRPOBatch, settings: GRPOSettings, gamma: float = 0.3, epsilon: float = EPSILON
) -> tuple[Float[Array, "b t"], Metrics]:
    """Compute the advantage of every token of a batch.

    Args:
        batch: Log-probs, rewards and structural tokens.
        settings: The recipe's variant of GRPO.
        gamma: `RewardSettings.gamma`, the penalty for violations under the anchor `credit`.
        epsilon: Added to standard deviations.

    Returns:
        Advantages, 0 outside the trained tokens, and metrics of the step.
    """
    mask = batch.trained
    shaped = shape_rewards(batch.rewards, settings)
    of_rewards = NORMALISATIONS[settings.reward_normalisation]
    of_tokens = NORMALISATIONS[settings.advantage_normalisation]
    normed = normalise(shaped, batch.valid, of_rewards, epsilon)
    kl = kl_penalty(batch.behaviour, batch.reference, settings.kl_kind)
    raw = token_advantages(normed.reshape(-1), kl, mask, settings.kl_coefficient)
    out = normalise_tokens(raw, normed, batch, of_tokens, epsilon)
    # After the normalisation, which would otherwise spread the credit over all tokens.
    if settings.anchor == "credit":
        in_groups = NORMALISATIONS["group"]
        credit = normalise(batch.anchor_rewards, batch.valid, in_groups, epsilon)
        out = anchor_credit(out, credit, batch, settings.anchor_weight, gamma)
    # Silent groups have equal rewards: their advantages consist of the KL penalty only.
    # A group whose rewards are equal after shaping is silent.
    differs = varied(shape_rewards(batch.rewards, settings), batch.valid)[:, 0]
    silent = masked_mean(1.0 - differs, batch.valid.any(1))
    scale = jnp.float32(1.0)
    if settings.min_signal:
        scale = jnp.minimum(1.0, (1.0 - silent) / settings.min_signal)
    out = scale * out

    scaled = jnp.abs(batch.rewards - settings.reward_bias) * settings.reward_scaling
    clipped = scaled >= (settings.reward_clip or jnp.inf)
    metrics = {
        "kl_reference": masked_mean(kl, mask),
        "silent_groups": silent,
        "advantage_scale": scale,
        "clipped_rewards": masked_mean(clipped.astype(jnp.float32), batch.valid),
        "advantage_rms": jnp.sqrt(masked_mean(out**2, mask)),
    }
    return jax.lax.stop_gradient(out), metrics
