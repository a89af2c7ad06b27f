"""The four places where the format reward can act. A recipe chooses one.

    likelihood  a term of the objective, as in the paper's formula: `anchor_likelihood`
    credit      advantages of structural tokens: `anchor_credit`
    sequence    part of the sequence reward, computed in `paravt_jax.method.rewards`
    none        nowhere

The content of tool calls gets neither credit nor penalty. The exception is the last token of a
response that ends inside a call.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from paravt_jax.method.grpo.batch import GRPOBatch, Metrics, masked_mean
from paravt_jax.method.structure import TAGS, Kind, Structure


def anchor_likelihood(
    logprobs: Float[Array, "b t"],
    weight: Float[Array, "b t"],
    batch: GRPOBatch,
    gamma: float,
    total: Num[Array, ""] | None = None,
) -> Float[Array, ""]:
    """Return the paper's R_fmt as a term of the objective.

    Sums the log-likelihood of the tags of compliant rollouts, subtracts gamma times that of all
    violations, and divides by the number of tags and violations. The paper has no penalty.

    Args:
        logprobs: Log-probs under the current policy.
        weight: Importance weight of each token (`behaviour_weight`). With it, the gradient is
            that of a reward of 1 per tag and -gamma per violation, even if older weights sampled.
        batch: The structural tokens.
        gamma: Penalty for a violation.
        total: Number of tags and violations of the whole batch, if `batch` is a micro-batch.
    """
    # A token that is both a tag and a violation counts only once in the total.
    tags, violations = structural_tokens(batch)
    if total is None:
        total = (tags | violations).sum()
    weighed = jnp.where(tags | violations, weight * logprobs, 0.0)
    return masked_mean(weighed, tags, total) - gamma * masked_mean(weighed, violations, total)


def structural_tokens(batch: GRPOBatch) -> tuple[Bool[Array, "b t"], Bool[Array, "b t"]]:
    """Return the masks of the trained tokens with a tag of a compliant rollout, and with a
    violation."""
    length = batch.mask.shape[1]
    is_tag = _is_tag(batch.structure)
    compliant = batch.compliant.reshape(-1, 1)

    def token_mask(selected: Bool[Array, "b s"]) -> Bool[Array, "b t"]:
        # A token that is part of two tags is selected twice.
        counts = structural_weights(batch.structure, selected.astype(jnp.float32), length)
        return (counts > 0) & batch.trained

    return token_mask(is_tag & compliant), token_mask(~is_tag)


def anchor_credit(
    advantages: Float[Array, "b t"],
    credit: Float[Array, "p g"],
    batch: GRPOBatch,
    weight: float,
    gamma: float,
) -> Float[Array, "b t"]:
    """Add weight * credit to the advantages of tags, and -weight * gamma to those of violations.

    No other token changes.

    Args:
        advantages: Advantages of all tokens.
        credit: R_anchor of each rollout, normalised in its group.
        batch: The structural tokens.
        weight: `GRPOSettings.anchor_weight`.
        gamma: Penalty for a violation.
    """
    values = jnp.where(_is_tag(batch.structure), credit.reshape(-1, 1), -gamma)
    extra = structural_weights(batch.structure, weight * values, advantages.shape[1])
    return jnp.where(batch.trained, advantages + extra, advantages)


def structural_weights(
    structure: Structure, values: Float[Array, "b s"], length: int
) -> Float[Array, "b t"]:
    """Scatter one value per structural token onto rows of `length` tokens.

    A token that appears twice gets the sum of its values. Padding adds nothing.
    """
    # trajectories [b, 1] and positions [b, s] index the tokens together.
    trajectories = jnp.arange(structure.positions.shape[0])[:, None]
    zeros = jnp.zeros((structure.positions.shape[0], length), values.dtype)
    # Padding has position 0, which is a real token, so it has to add 0 there.
    return zeros.at[trajectories, structure.positions].add(jnp.where(structure.valid, values, 0.0))


def tag_counts(batch: GRPOBatch) -> Float[Array, " k"]:
    """Return the number of trained tokens of tags, of each kind in `TAGS`.

    A token with the kinds of two tags counts for both.
    """
    return _of_each_tag(batch).sum((1, 2)).astype(jnp.float32)


def tag_likelihood(
    logprobs: Float[Array, "b t"], batch: GRPOBatch, totals: Float[Array, " k"]
) -> Metrics:
    """Return how likely the tags that were sampled are under the current policy. It has no
    gradient.

    The tags of all valid rollouts count, compliant or not. Pinned tags do not. Every recipe has
    these metrics, with an anchor or without.

    Args:
        logprobs: Log-probs under the current policy.
        batch: The structural tokens.
        totals: `tag_counts` of the whole batch, if `batch` is a micro-batch.

    Returns:
        `tags/probability` and `tags/logprob`: means over all tags. `tags/KIND/probability`: the
        mean for each kind. `tags/count` and `tags/KIND/count`: their number of tokens. The metrics
        of micro-batches add up. A mean over no token is 0.
    """
    chosen = _of_each_tag(batch)
    at_tags = jnp.take_along_axis(logprobs, batch.structure.positions, axis=1)
    at_tags = jax.lax.stop_gradient(at_tags)
    # Entries that are not chosen may be NaN.
    logprob = jnp.where(chosen, at_tags, 0.0).sum((1, 2))
    probability = jnp.where(chosen, jnp.exp(at_tags), 0.0).sum((1, 2))
    count = chosen.sum((1, 2)).astype(jnp.float32)
    total = jnp.maximum(totals.sum(), 1)
    metrics = {
        "tags/probability": probability.sum() / total,
        "tags/logprob": logprob.sum() / total,
        "tags/count": count.sum(),
    }
    for n, kind in enumerate(TAGS):
        name = f"tags/{kind.name.lower()}"
        metrics[f"{name}/probability"] = probability[n] / jnp.maximum(totals[n], 1)
        metrics[f"{name}/count"] = count[n]
    return metrics


def _of_each_tag(batch: GRPOBatch) -> Bool[Array, "k b s"]:
    """Return, for each kind in `TAGS`, the structural tokens of that kind that are trained."""
    structure = batch.structure
    trained = jnp.take_along_axis(batch.trained, structure.positions, axis=1)
    kinds = jnp.array(TAGS, structure.kinds.dtype)[:, None, None]
    return jnp.logical_and(structure.valid, trained)[None] & (structure.kinds[None] == kinds)


def _is_tag(structure: Structure) -> Bool[Array, "b s"]:
    return jnp.logical_and(structure.valid, structure.kinds != Kind.VIOLATION)
