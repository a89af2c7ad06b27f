"""PARA-GRPO: from what rollouts earned to a loss, as pure functions on arrays.

Owns the algorithm of REFERENCE 3, steps 1 to 4, and the four places where the anchor can act. Refuses text, models and
optimisers. Alignment: index t of log-probs, masks and advantages speaks of token t itself, given everything before it.
Invariant: padding, the order of groups and of rollouts inside a group, and how rows are split over micro-batches (with
`Totals` of the whole batch) change neither loss nor gradient.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paravt_jax.rewards import RewardSettings
from paravt_jax.structure import Kind, Structure

Anchor = Literal["likelihood", "credit", "sequence", "none"]
Metrics = dict[str, Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class GRPOSettings:
    """The algorithm's numbers; the defaults are the published recipe (REFERENCE 3)."""

    group_size: int = 8
    """Rollouts per prompt."""
    reward_bias: float = 0.2
    """Subtracted from a reward before scaling."""
    reward_scaling: float = 10.0
    """Factor on a reward before it is clipped and normalised in its group."""
    reward_clip: float | None = 20.0
    """Bound on scaled rewards, None for none: 20 saturates at R = 2.2 while 2.8 can be earned (REFERENCE 4, 14)."""
    kl_coefficient: float = 0.01
    """Weight of the KL to the reference policy, as a token reward."""
    kl_kind: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of that KL from one sample."""
    kl_clamp: float = 10.0
    """Bound on each token's KL estimate."""
    clip: float = 0.2
    """The ratio to the proximal policy is clipped to [1 - clip, 1 + clip]."""
    behaviour_cap: float = 5.0
    """Tokens whose weight exp(proximal - behaviour) is larger are left out."""
    epsilon: float = 1e-5
    """Added to standard deviations."""
    anchor: Anchor = "sequence"
    """Where R_anchor acts: `likelihood` of struct(o) added to the objective (the paper's formula), `credit` on the tokens of struct(o)
    alone, `sequence` in the sequence reward (the release; weight in RewardSettings.anchor_weight), or `none`."""
    anchor_weight: float = 0.5
    """Weight of the anchor under `likelihood` and `credit`."""
    violation_penalty: float = 0.3
    """gamma: under `credit`, what the token that broke a block loses, times anchor_weight."""

    def __post_init__(self):
        if self.group_size < 2:
            raise ValueError(f"GRPOSettings.group_size: {self.group_size} is too small; a group needs at least 2 rollouts to compare")
        for name in ("reward_scaling", "kl_clamp", "behaviour_cap", "epsilon"):
            if not getattr(self, name) > 0:
                raise ValueError(f"GRPOSettings.{name}: {getattr(self, name)} is not positive; give a number above 0")
        for name in ("kl_coefficient", "anchor_weight", "violation_penalty"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"GRPOSettings.{name}: {getattr(self, name)} is negative; give a number of at least 0")
        if not 0 < self.clip < 1:
            raise ValueError(f"GRPOSettings.clip: {self.clip} is outside (0, 1); give for instance 0.2")


def check_anchor(rewards: RewardSettings, grpo: GRPOSettings) -> None:
    """Raises ValueError where R_anchor would act twice, or nowhere though asked for: it has one place in a recipe."""
    if (rewards.anchor_weight > 0) != (grpo.anchor == "sequence"):
        remedy = "a positive weight" if grpo.anchor == "sequence" else "0"
        raise ValueError(
            f"RewardSettings.anchor_weight: {rewards.anchor_weight} with GRPOSettings.anchor {grpo.anchor!r}; "
            f"R_anchor belongs to the sequence reward under 'sequence' alone, so set it to {remedy}"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GRPOBatch:
    """One batch of rollouts: p prompts with g rollouts each, rows in that order (b = p * g).

    `mask` marks the generated tokens that are trained on; log-probs elsewhere are ignored. `proximal` is None when each batch
    makes one update: then it is the current policy. `valid` is False for rollouts that count for nothing. `parseable` marks the
    rollouts whose structure `likelihood` rewards.
    """

    mask: Bool[Array, "b t"]
    behaviour: Float[Array, "b t"]
    reference: Float[Array, "b t"]
    rewards: Float[Array, "p g"]
    anchor_rewards: Float[Array, "p g"]
    valid: Bool[Array, "p g"]
    parseable: Bool[Array, " b"]
    structure: Structure
    proximal: Float[Array, "b t"] | None = None

    @property
    def trained(self) -> Bool[Array, "b t"]:
        """The generated tokens of valid rollouts."""
        return self.mask & self.valid.reshape(-1, 1)


class Totals(NamedTuple):
    """What the loss divides by. When a batch is split, each part is given the totals of the whole."""

    tokens: Float[Array, ""]
    structural: Float[Array, ""]


def masked_sum(x: Float[Array, "*s"], mask: Bool[Array, "*s"]) -> Float[Array, ""]:
    """Sum of x where mask; what stands elsewhere, NaN included, does not reach value or gradient."""
    return jnp.where(mask, x, 0.0).sum()


def masked_mean(x: Float[Array, "*s"], mask: Bool[Array, "*s"], total: Float[Array, ""] | None = None) -> Float[Array, ""]:
    """Mean of x where mask, over `total` elements if given, else over the mask's; 0 where there are none."""
    return masked_sum(x, mask) / jnp.maximum(mask.sum() if total is None else total, 1)


# --- rewards of rollouts ---------------------------------------------------------------------------------------------


def shape_rewards(rewards: Float[Array, "p g"], settings: GRPOSettings) -> Float[Array, "p g"]:
    """clip((R - bias) * scaling, -clip, clip) (REFERENCE 3, step 1)."""
    shaped = (rewards - settings.reward_bias) * settings.reward_scaling
    return shaped if settings.reward_clip is None else jnp.clip(shaped, -settings.reward_clip, settings.reward_clip)


def normalise_in_group(
    rewards: Float[Array, "p g"], valid: Bool[Array, "p g"], epsilon: float = 1e-5
) -> tuple[Float[Array, "p g"], Bool[Array, " p"]]:
    """(R - mean) / (std + epsilon) over the valid rollouts of each group, std unbiased; and which groups are silent.

    A silent group has fewer than two valid rollouts or equal rewards: it says nothing, and all its values are exactly 0.
    """
    n = valid.sum(1, keepdims=True)
    low = jnp.where(valid, rewards, jnp.inf).min(1, keepdims=True)
    high = jnp.where(valid, rewards, -jnp.inf).max(1, keepdims=True)
    silent = (n < 2) | ~(high > low)
    mean = jnp.where(valid, rewards, 0.0).sum(1, keepdims=True) / jnp.maximum(n, 1)
    centred = jnp.where(valid & ~silent, rewards - mean, 0.0)
    std = jnp.sqrt((centred**2).sum(1, keepdims=True) / jnp.maximum(n - 1, 1))
    return centred / (std + epsilon), silent[:, 0]


# --- advantages of tokens --------------------------------------------------------------------------------------------


def kl_penalty(
    logprobs: Float[Array, "b t"], base: Float[Array, "b t"], kind: Literal["k1", "k2", "k3"] = "k1", clamp: float | None = 10.0
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


def normalise_advantages(
    advantages: Float[Array, "b t"], mask: Bool[Array, "b t"], signal: Bool[Array, ""] | bool = True, epsilon: float = 1e-5
) -> Float[Array, "b t"]:
    """(A - mean) / (std + epsilon) over all masked tokens, std unbiased; 0 elsewhere.

    Where `signal` is False - every group of the batch is silent, and A holds nothing but the small KL penalty - A is left as it is:
    divided by its own deviation that noise would weigh as much as a reward (REFERENCE 4, 13).
    """
    n = mask.sum()
    centred = jnp.where(mask, advantages - masked_mean(advantages, mask), 0.0)
    std = jnp.sqrt((centred**2).sum() / jnp.maximum(n - 1, 1))
    return jnp.where(signal, centred / (std + epsilon), jnp.where(mask, advantages, 0.0))


def structural_weights(structure: Structure, values: Float[Array, "b s"], length: int) -> Float[Array, "b t"]:
    """Scatters one value per structural token onto the token axis; tokens named twice get the sum, padding nothing."""
    rows = jnp.arange(structure.positions.shape[0])[:, None]
    return (
        jnp.zeros((structure.positions.shape[0], length), values.dtype)
        .at[rows, structure.positions]
        .add(jnp.where(structure.valid, values, 0.0))
    )


def _is_tag(structure: Structure) -> Bool[Array, "b s"]:
    return jnp.logical_and(structure.valid, structure.kinds != Kind.VIOLATION)


def anchor_credit(advantages: Float[Array, "b t"], batch: GRPOBatch, settings: GRPOSettings) -> Float[Array, "b t"]:
    """Adds anchor_weight * (R_anchor normalised in its group) to the tags of struct(o), and -anchor_weight * gamma at violations.

    No other token changes: what stands inside a tool call stays free.
    """
    credit, _ = normalise_in_group(batch.anchor_rewards, batch.valid, settings.epsilon)
    values = jnp.where(_is_tag(batch.structure), credit.reshape(-1, 1), -settings.violation_penalty)
    extra = structural_weights(batch.structure, settings.anchor_weight * values, advantages.shape[1])
    return jnp.where(batch.trained, advantages + extra, advantages)


def advantages(batch: GRPOBatch, settings: GRPOSettings) -> tuple[Float[Array, "b t"], Metrics]:
    """The advantage of every token, computed once a step from behaviour and reference log-probs (REFERENCE 3, steps 1 to 3)."""
    g = batch.rewards.shape[1]
    if g != settings.group_size:
        raise ValueError(f"GRPOSettings.group_size: {settings.group_size}, but the batch has groups of {g}; make them equal")
    mask = batch.trained
    normed, silent = normalise_in_group(shape_rewards(batch.rewards, settings), batch.valid, settings.epsilon)
    kl = kl_penalty(batch.behaviour, batch.reference, settings.kl_kind, settings.kl_clamp)
    raw = token_advantages(normed.reshape(-1), kl, mask, settings.kl_coefficient)
    out = normalise_advantages(raw, mask, ~silent.all(), settings.epsilon)
    if settings.anchor == "credit":
        out = anchor_credit(out, batch, settings)
    clipped = jnp.abs(batch.rewards - settings.reward_bias) * settings.reward_scaling >= (settings.reward_clip or jnp.inf)
    metrics = {
        "kl_reference": masked_mean(kl, mask),
        "silent_groups": masked_mean(silent.astype(jnp.float32), batch.valid.any(1)),
        "clipped_rewards": masked_mean(clipped.astype(jnp.float32), batch.valid),
        "advantage_std": jnp.sqrt(masked_mean(out**2, mask)),
    }
    return jax.lax.stop_gradient(out), metrics


# --- loss ------------------------------------------------------------------------------------------------------------


def policy_loss(
    logprobs: Float[Array, "b t"],
    proximal: Float[Array, "b t"],
    behaviour: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    settings: GRPOSettings,
    tokens: Float[Array, ""] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Decoupled PPO (REFERENCE 3, step 4): the clipped loss against the proximal policy, weighted by how much likelier that policy
    found the token than the sampler did. No gradient flows through the weight; above behaviour_cap it is 0. Divided by `tokens`, by
    default the masked ones; capped tokens stay in the denominator.
    """
    proximal = jax.lax.stop_gradient(proximal)
    ratio = jnp.exp(jnp.where(mask, logprobs - proximal, 0.0))
    clipped = jnp.clip(ratio, 1 - settings.clip, 1 + settings.clip)
    advantages = jnp.where(mask, advantages, 0.0)
    weight = jnp.exp(jnp.where(mask, proximal - behaviour, 0.0))
    kept = weight <= settings.behaviour_cap
    weight = jax.lax.stop_gradient(jnp.where(kept, weight, 0.0))
    loss = jnp.maximum(-advantages * ratio, -advantages * clipped) * weight
    metrics = {
        "clip_fraction": masked_mean((-advantages * ratio < -advantages * clipped).astype(jnp.float32), mask, tokens),
        "capped_fraction": masked_mean((~kept).astype(jnp.float32), mask, tokens),
        "behaviour_gap": masked_mean(jnp.abs(proximal - behaviour), mask, tokens),
    }
    return masked_mean(loss, mask, tokens), metrics


def structural_mask(batch: GRPOBatch) -> Bool[Array, "b t"]:
    """The trained tokens that hold a tag, in parseable rollouts."""
    tags = _is_tag(batch.structure) & batch.parseable[:, None]
    return (structural_weights(batch.structure, tags.astype(jnp.float32), batch.mask.shape[1]) > 0) & batch.trained


def anchor_likelihood(
    logprobs: Float[Array, "b t"], structural: Bool[Array, "b t"], total: Float[Array, ""] | None = None
) -> Float[Array, ""]:
    """Mean log-likelihood of the structural tokens (`structural_mask`), the paper's R_fmt as a term of the objective (REFERENCE 2)."""
    return masked_mean(logprobs, structural, total)


def batch_totals(batch: GRPOBatch) -> Totals:
    """The denominators of a whole batch, for losses computed in parts."""
    return Totals(batch.trained.sum().astype(jnp.float32), structural_mask(batch).sum().astype(jnp.float32))


def paravt_loss(
    logprobs: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    batch: GRPOBatch,
    settings: GRPOSettings,
    totals: Totals | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The whole loss of a batch, and its metrics. `advantages` come from the function of that name, once a step.

    With `totals` of a whole batch, losses and metrics of its parts add up to the whole's.
    """
    totals = batch_totals(batch) if totals is None else totals
    proximal = logprobs if batch.proximal is None else batch.proximal
    loss, metrics = policy_loss(logprobs, proximal, batch.behaviour, advantages, batch.trained, settings, totals.tokens)
    if settings.anchor == "likelihood":
        likelihood = anchor_likelihood(logprobs, structural_mask(batch), totals.structural)
        metrics["anchor_likelihood"] = likelihood
        loss = loss - settings.anchor_weight * likelihood
    return loss, metrics | {"loss": loss}
