"""The four places where the format reward can act (paper; REFERENCE 2): each is one function, and a recipe names one.

`likelihood`: `anchor_likelihood`, a term of the objective, the paper's formula. `credit`: `anchor_credit`, advantages of structural
tokens. `sequence`: R_anchor is part of the sequence reward already (`paravt_jax.method.rewards.score`), nothing is left to do here.
`none`: it acts nowhere. Tool-call content is not touched, but for the last token of a response that ends inside a call.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paravt_jax.method.grpo.batch import GRPOBatch, masked_mean
from paravt_jax.method.structure import Kind, Structure


def anchor_likelihood(
    logprobs: Float[Array, "b t"],
    weight: Float[Array, "b t"],
    batch: GRPOBatch,
    gamma: float,
    total: Float[Array, ""] | None = None,
) -> Float[Array, ""]:
    """The paper's R_fmt (REFERENCE 2) as a term of the objective: the log-likelihood of the tags of compliant rollouts, less, and this is
    ours, gamma times that of the violations of all; a mean over both. `total` is their number where the batch is a part of a larger one.

    `weight` is how much likelier the policy finds a token than its sampler did (`behaviour_weight`): with it the gradient is that of a
    reward, 1 for such a tag and -gamma for a violation, for rollouts of older weights too.
    """
    tags, violations = structural_tokens(batch)
    total = (tags | violations).sum() if total is None else total
    weighed = jnp.where(tags | violations, weight * logprobs, 0.0)
    return masked_mean(weighed, tags, total) - gamma * masked_mean(weighed, violations, total)


def structural_tokens(batch: GRPOBatch) -> tuple[Bool[Array, "b t"], Bool[Array, "b t"]]:
    """The trained tokens that hold a tag in a compliant rollout, and those that broke a block in any."""
    is_tag, compliant = _is_tag(batch.structure), batch.of_rows(batch.compliant)[:, None]

    def marked(which: Bool[Array, "b s"]) -> Bool[Array, "b t"]:
        return (
            structural_weights(batch.structure, which.astype(jnp.float32), batch.mask.shape[1]) > 0
        ) & batch.trained

    return marked(is_tag & compliant), marked(~is_tag)


def anchor_credit(
    advantages: Float[Array, "b t"],
    credit: Float[Array, "p g"],
    batch: GRPOBatch,
    weight: float,
    gamma: float,
) -> Float[Array, "b t"]:
    """Adds weight * `credit`, R_anchor normalised in its group, to the tags of struct(o), and -weight * gamma at violations.

    No other token changes: what stands inside a tool call stays free.
    """
    values = jnp.where(_is_tag(batch.structure), batch.of_rows(credit)[:, None], -gamma)
    extra = structural_weights(batch.structure, weight * values, advantages.shape[1])
    return jnp.where(batch.trained, advantages + extra, advantages)


def structural_weights(
    structure: Structure, values: Float[Array, "b s"], length: int
) -> Float[Array, "b t"]:
    """Scatters one value per structural token onto the token axis; tokens named twice get the sum, padding nothing."""
    rows = jnp.arange(structure.positions.shape[0])[:, None]
    zeros = jnp.zeros((structure.positions.shape[0], length), values.dtype)
    return zeros.at[rows, structure.positions].add(jnp.where(structure.valid, values, 0.0))


def _is_tag(structure: Structure) -> Bool[Array, "b s"]:
    return jnp.logical_and(structure.valid, structure.kinds != Kind.VIOLATION)
