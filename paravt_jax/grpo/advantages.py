"""From what rollouts earned to each token's advantage (REFERENCE 3, steps 1 to 3). Computed once a step, without gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paravt_jax.grpo.anchor import anchor_credit
from paravt_jax.grpo.batch import GRPOBatch, Metrics, masked_mean
from paravt_jax.grpo.settings import GRPOSettings, KLKind, Level, Normalisation


def shape_rewards(rewards: Float[Array, "p g"], settings: GRPOSettings) -> Float[Array, "p g"]:
    """clip((R - bias) * scaling, -clip, clip) (REFERENCE 3, step 1)."""
    shaped = (rewards - settings.reward_bias) * settings.reward_scaling
    return shaped if settings.reward_clip is None else jnp.clip(shaped, -settings.reward_clip, settings.reward_clip)


def _over(level: Level) -> int | None:
    """The axis of [groups, members] that a level's statistics run over: a group's members, or all of the batch."""
    return 1 if level == "group" else None


def normalise(
    x: Float[Array, "p n"], mask: Bool[Array, "p n"], how: Normalisation, epsilon: float = 1e-5
) -> tuple[Float[Array, "p n"], Bool[Array, " p"]]:
    """(x - mean) / (std + epsilon) of the masked values, 0 elsewhere; and which groups (rows) are silent.

    std is unbiased, of what is left when the mean is taken off. A group is silent if it has nothing masked, or if what its mean is taken
    over holds fewer than two values, or equal ones: it says nothing, and all its values are exactly 0, not rounding errors over epsilon.
    """
    values = jnp.where(mask, x, 0.0)
    silent = ~mask.any(1, keepdims=True)
    mean = jnp.zeros(())
    if how.mean != "none":
        axis = _over(how.mean)
        n, total = mask.sum(axis, keepdims=True), values.sum(axis, keepdims=True)
        equal = jnp.where(mask, x, jnp.inf).min(axis, keepdims=True) >= jnp.where(mask, x, -jnp.inf).max(axis, keepdims=True)
        silent = silent | equal | (n < 2)
        mean = (total - values) / jnp.maximum(n - 1, 1) if how.leave_one_out else total / jnp.maximum(n, 1)
    centred = jnp.where(mask & ~silent, x - mean, 0.0)
    if how.std == "none":
        return centred, silent[:, 0]
    axis = _over(how.std)
    std = jnp.sqrt((centred**2).sum(axis, keepdims=True) / jnp.maximum(mask.sum(axis, keepdims=True) - 1, 1))
    return centred / (std + epsilon), silent[:, 0]


def kl_penalty(
    logprobs: Float[Array, "b t"], base: Float[Array, "b t"], kind: KLKind = "k1", clamp: float | None = 10.0
) -> Float[Array, "b t"]:
    """Each token's estimate of KL(policy || base) from the sampled token: k1 d, k2 d^2 / 2, k3 exp(-d) - 1 + d with d the log-ratio."""
    d = logprobs - base
    kl = {"k1": lambda: d, "k2": lambda: d**2 / 2, "k3": lambda: jnp.exp(-d) - 1 + d}[kind]()
    return kl if clamp is None else jnp.clip(kl, -clamp, clamp)


def token_advantages(
    rewards: Float[Array, " b"], kl: Float[Array, "b t"], mask: Bool[Array, "b t"], coefficient: float
) -> Float[Array, "b t"]:
    """The sum of token rewards from each generated token on (gamma = lambda = 1, no critic); 0 on other tokens.

    A token's reward is -coefficient * kl; the rollout's reward stands on its last generated token, also where tool tokens follow it, so
    that no rollout loses it (REFERENCE 4, 6).
    """
    penalties = jnp.where(mask, -coefficient * kl, 0.0)
    onward = jnp.flip(jnp.cumsum(jnp.flip(penalties, 1), axis=1), 1)
    return jnp.where(mask, onward + rewards[:, None], 0.0)


def normalise_tokens(
    advantages: Float[Array, "b t"], batch: GRPOBatch, how: Normalisation, signal: Bool[Array, ""] | bool = True, epsilon: float = 1e-5
) -> Float[Array, "b t"]:
    """`normalise` over the trained tokens of the batch, or of each group.

    Where `signal` is False - every group of the batch is silent, and A holds nothing but the small KL penalty - A is left as it is:
    divided by its own deviation that noise would weigh as much as a reward (REFERENCE 4, 13).
    """
    mask = batch.trained
    if "group" in (how.mean, how.std):
        groups = batch.rewards.shape[0]
        mine = (batch.rollout // batch.rewards.shape[1])[None] == jnp.arange(groups)[:, None]
        members = (mine[:, :, None] & mask).reshape(groups, -1)
        out, _ = normalise(jnp.broadcast_to(advantages.reshape(-1), members.shape), members, how, epsilon)
        normed = out.sum(0).reshape(advantages.shape)
    else:
        out, _ = normalise(advantages.reshape(1, -1), mask.reshape(1, -1), how, epsilon)
        normed = out.reshape(advantages.shape)
    return jnp.where(signal, normed, jnp.where(mask, advantages, 0.0))


def advantages(batch: GRPOBatch, settings: GRPOSettings) -> tuple[Float[Array, "b t"], Metrics]:
    """The advantage of every token, from behaviour and reference log-probs and what the rollouts earned."""
    g = batch.rewards.shape[1]
    if g != settings.group_size:
        raise ValueError(f"GRPOSettings.group_size: {settings.group_size}, but the batch has groups of {g}; make them equal")
    mask = batch.trained
    normed, silent = normalise(shape_rewards(batch.rewards, settings), batch.valid, settings.reward_normalisation, settings.epsilon)
    kl = kl_penalty(batch.behaviour, batch.reference, settings.kl_kind, settings.kl_clamp)
    raw = token_advantages(batch.of_rows(normed), kl, mask, settings.kl_coefficient)
    out = normalise_tokens(raw, batch, settings.advantage_normalisation, ~silent.all(), settings.epsilon)
    if settings.anchor == "credit":
        credit, _ = normalise(batch.anchor_rewards, batch.valid, Normalisation("group", "group"), settings.epsilon)
        out = anchor_credit(out, credit, batch, settings)
    clipped = jnp.abs(batch.rewards - settings.reward_bias) * settings.reward_scaling >= (settings.reward_clip or jnp.inf)
    metrics = {
        "kl_reference": masked_mean(kl, mask),
        "silent_groups": masked_mean(silent.astype(jnp.float32), batch.valid.any(1)),
        "clipped_rewards": masked_mean(clipped.astype(jnp.float32), batch.valid),
        "advantage_std": jnp.sqrt(masked_mean(out**2, mask)),
    }
    return jax.lax.stop_gradient(out), metrics
