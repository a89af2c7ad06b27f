"""From what rollouts earned to each token's advantage (REFERENCE 3, steps 1 to 3). Computed once a step, without gradient."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paravt_jax.method.grpo.anchor import anchor_credit
from paravt_jax.method.grpo.batch import GRPOBatch, Metrics, masked_mean
from paravt_jax.method.grpo.settings import GRPOSettings, KLKind, Level, Normalisation


def shape_rewards(rewards: Float[Array, "p g"], settings: GRPOSettings) -> Float[Array, "p g"]:
    """clip((R - bias) * scaling, -clip, clip) (REFERENCE 3, step 1)."""
    shaped = (rewards - settings.reward_bias) * settings.reward_scaling
    return (
        shaped
        if settings.reward_clip is None
        else jnp.clip(shaped, -settings.reward_clip, settings.reward_clip)
    )


def _over(level: Level) -> int | None:
    """The axis of [groups, members] that a level's statistics run over: a group's members, or all of the batch."""
    return 1 if level == "group" else None


def varied(
    x: Float[Array, "p n"], mask: Bool[Array, "p n"], level: Level = "group"
) -> Bool[Array, "p 1"] | Bool[Array, "1 1"]:
    """Whether there are different values among the masked ones, of each group or of the batch; one alone differs from nothing."""
    axis = _over(level)
    return jnp.where(mask, x, -jnp.inf).max(axis, keepdims=True) > jnp.where(mask, x, jnp.inf).min(
        axis, keepdims=True
    )


def normalise(
    x: Float[Array, "p n"], mask: Bool[Array, "p n"], how: Normalisation, epsilon: float = 1e-5
) -> Float[Array, "p n"]:
    """(x - mean) / (std + epsilon) of the masked values, 0 elsewhere. std is unbiased, of what is left when the mean is taken off.

    Values that do not differ from each other are exactly 0 when their mean is off, not rounding errors over epsilon.
    """
    values = jnp.where(mask, x, 0.0)
    centred = values
    if how.mean != "none":
        axis = _over(how.mean)
        n, total = mask.sum(axis, keepdims=True), values.sum(axis, keepdims=True)
        mean = (
            (total - values) / jnp.maximum(n - 1, 1)
            if how.leave_one_out
            else total / jnp.maximum(n, 1)
        )
        centred = jnp.where(mask & varied(x, mask, how.mean), x - mean, 0.0)
    if how.std == "none":
        return centred
    axis = _over(how.std)
    std = jnp.sqrt(
        (centred**2).sum(axis, keepdims=True) / jnp.maximum(mask.sum(axis, keepdims=True) - 1, 1)
    )
    return centred / (std + epsilon)


def kl_penalty(
    logprobs: Float[Array, "b t"],
    base: Float[Array, "b t"],
    kind: KLKind = "k1",
    clamp: float | None = 10.0,
) -> Float[Array, "b t"]:
    """Each token's estimate of KL(policy || base) from the sampled token: k1 d, k2 d^2 / 2, k3 exp(-d) - 1 + d with d the log-ratio."""
    d = logprobs - base
    kl = {"k1": lambda: d, "k2": lambda: d**2 / 2, "k3": lambda: jnp.exp(-d) - 1 + d}[kind]()
    return kl if clamp is None else jnp.clip(kl, -clamp, clamp)


def token_advantages(
    rewards: Float[Array, " b"],
    kl: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    coefficient: float,
) -> Float[Array, "b t"]:
    """The sum of token rewards from each generated token on (gamma = lambda = 1, no critic); 0 on other tokens.

    A token's reward is -coefficient * kl; the rollout's reward stands on its last generated token, also where tool tokens follow it, so
    that no rollout loses it (REFERENCE 4, 6).
    """
    penalties = jnp.where(mask, -coefficient * kl, 0.0)
    onward = jnp.flip(jnp.cumsum(jnp.flip(penalties, 1), axis=1), 1)
    return jnp.where(mask, onward + rewards[:, None], 0.0)


def normalise_tokens(
    advantages: Float[Array, "b t"],
    rewards: Float[Array, "p g"],
    batch: GRPOBatch,
    how: Normalisation,
    epsilon: float = 1e-5,
) -> Float[Array, "b t"]:
    """`normalise` over the trained tokens of the batch, or of each group.

    Where all rollouts whose tokens would share a deviation earned the same (`rewards`, as they entered A), A holds no signal but the
    small KL penalty, and only its mean is taken off: divided by its own deviation that noise would weigh as much as a reward
    (REFERENCE 4, 13).
    """
    mask, (groups, size) = batch.trained, rewards.shape
    if "group" in (how.mean, how.std):
        members = (
            (batch.rollout // size)[None, :, None] == jnp.arange(groups)[:, None, None]
        ) & mask
    else:
        members = mask[None]
    values, members = (
        jnp.broadcast_to(advantages, members.shape).reshape(len(members), -1),
        members.reshape(len(members), -1),
    )
    normed = jnp.where(
        varied(rewards, batch.valid, how.std),
        normalise(values, members, how, epsilon),
        normalise(values, members, dataclasses.replace(how, std="none")),
    )
    return normed.sum(0).reshape(mask.shape)


def advantages(
    batch: GRPOBatch, settings: GRPOSettings, gamma: float = 0.3
) -> tuple[Float[Array, "b t"], Metrics]:
    """The advantage of every token, from behaviour and reference log-probs and what the rollouts earned.

    `gamma` is `RewardSettings.gamma`: under `credit` it acts in R_anchor and at the token that broke a block.
    """
    batch.check()
    g = batch.rewards.shape[1]
    if g != settings.group_size:
        raise ValueError(
            f"GRPOSettings.group_size: {settings.group_size}, but the batch has groups of {g}; make them equal"
        )
    mask = batch.trained
    shaped = shape_rewards(batch.rewards, settings)
    normed = normalise(shaped, batch.valid, settings.reward_normalisation, settings.epsilon)
    kl = kl_penalty(batch.behaviour, batch.reference, settings.kl_kind, settings.kl_clamp)
    raw = token_advantages(batch.of_rows(normed), kl, mask, settings.kl_coefficient)
    out = normalise_tokens(raw, normed, batch, settings.advantage_normalisation, settings.epsilon)
    if settings.anchor == "credit":
        credit = normalise(
            batch.anchor_rewards, batch.valid, Normalisation("group", "group"), settings.epsilon
        )
        out = anchor_credit(out, credit, batch, settings.anchor_weight, gamma)
    clipped = jnp.abs(batch.rewards - settings.reward_bias) * settings.reward_scaling >= (
        settings.reward_clip or jnp.inf
    )
    metrics = {
        "kl_reference": masked_mean(kl, mask),
        "silent_groups": masked_mean(1.0 - varied(shaped, batch.valid)[:, 0], batch.valid.any(1)),
        "clipped_rewards": masked_mean(clipped.astype(jnp.float32), batch.valid),
        "advantage_rms": jnp.sqrt(masked_mean(out**2, mask)),
    }
    return jax.lax.stop_gradient(out), metrics
