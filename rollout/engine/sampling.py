"""Draws one token per row from its logits, with the row's own temperature and seed.

A row's draw depends only on that row's inputs, bit for bit, whatever the other rows are.

Over a mesh, each device has the scores of its part of the vocabulary. The devices exchange only the
largest scores, sums, and one block per row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from models.sharding import constrain, current_mesh

_BLOCK = 128  # tokens: the published vocabulary is a whole number of blocks


class Choices(NamedTuple):
    """How each row is sampled: its seed, and the fields of `requests.Sampling`."""

    seeds: UInt32[Any, " b"]
    temperatures: Float[Any, " b"]


@jax.named_scope("sample")
def sample(
    logits: Float[Array, "b v"], choices: Choices, numbers: Int[Array, " b"]
) -> tuple[Int[Array, " b"], Float[Array, " b"]]:
    """Draw a token per row.

    Args:
        logits: scores of the next token.
        choices: how to sample. Temperature 0 takes the likeliest token.
        numbers: per row, the number of this draw among the draws with its seed.

    Returns:
        Tokens, and their log-probs under the distribution they were drawn from; for temperature 0
        under the one at temperature 1.
    """
    greedy = choices.temperatures == 0
    temperatures = jnp.where(greedy, 1, choices.temperatures)
    # The largest score becomes 0 before the division. Otherwise a low temperature would turn large
    # scores into infinities.
    scores = logits.astype(jnp.float32)
    scores = (scores - scores.max(-1, keepdims=True)) / temperatures[:, None]
    keys = jax.vmap(lambda seed, number: jax.random.fold_in(jax.random.key(seed), number))(
        choices.seeds, numbers
    )
    token, total = draw_at(jnp.exp(scores), jax.vmap(jax.random.uniform)(keys))
    # The condition skips a pass over the vocabulary if no row needs it.
    token = jax.lax.cond(
        greedy.any(), lambda: jnp.where(greedy, jnp.argmax(scores, -1), token), lambda: token
    )
    score = jnp.take_along_axis(scores, token[:, None], 1)[:, 0]
    return token, score - jnp.log(total)


def draw_at(
    weights: Float[Array, "b v"], uniforms: Float[Array, " b"]
) -> tuple[Int[Array, " b"], Float[Array, " b"]]:
    """Invert the cumulative distribution: the token where it passes `uniforms`, and the total.

    One uniform number per row is enough. Gumbel noise for every token of the vocabulary would cost
    more than the product that gives the logits. The search has two levels, blocks and then tokens:

        weights         [. . . .] [. . . .] [. . . .]
        ends of blocks         ^         ^         ^      first end above target: the block
        in that block             [. . ^ .]               first sum above what is left: the token

    Each device's part of the vocabulary is padded to whole blocks, so that a block lies on one
    device.
    """
    mesh = current_mesh()
    devices = 1 if mesh is None else mesh.shape["tensor"]
    parts = weights.reshape(len(weights), devices, -1)
    padding = -parts.shape[-1] % _BLOCK
    blocks = jnp.pad(parts, ((0, 0), (0, 0), (0, padding))).reshape(len(weights), -1, _BLOCK)
    # Whole on every device: a search in sharded sums takes eight more exchanges (compiled).
    sums = constrain(blocks.sum(-1))
    # A cumulative sum is computed in a tree, so rounding moves it even where 0 is added. The mask
    # keeps blocks and tokens without weight from being the first above the target.
    ends = jnp.where(sums > 0, jnp.cumsum(sums, -1), 0)
    total = ends.max(-1)
    # Strictly below the total, so that the last end with weight is above it.
    target = jnp.minimum(uniforms, 1 - 2**-24) * total
    block = jnp.argmax(ends > target[:, None], -1)
    earlier = jnp.arange(ends.shape[1])[None, :] < block[:, None]
    before = jnp.where(earlier, ends, 0).max(-1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
    # `target - before` can exceed the sum of the block's tokens, which is rounded in another order.
    # The bound makes sure that some token passes it.
    sums = jnp.where(inside > 0, jnp.cumsum(inside, -1), 0)
    left = jnp.minimum(target - before, sums.max(-1) * (1 - 2**-23))
    passed = sums > left[:, None]
    padding_before = block // (ends.shape[1] // devices) * padding
    return block * _BLOCK - padding_before + jnp.argmax(passed, -1), total
