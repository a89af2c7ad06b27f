"""One token a row out of its scores: temperature, top-k, top-p, a seed of its own.

Owns the sampling distribution. Refuses sorting: which words stay is a threshold on their scores, found by bisection over float32's
order, so that a row costs a few passes over its words however many stay. Invariant: a row's draw depends on its own numbers only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

_BLOCK = 128  # words: the published vocabulary is a whole number of them


class Choices(NamedTuple):
    """`requests.Sampling` of every row, and its seed."""

    seeds: UInt32[Any, " b"]
    temperatures: Float[Any, " b"]
    top_k: Int[Any, " b"]
    top_p: Float[Any, " b"]


def sample(
    logits: Float[Array, "b v"], choices: Choices, numbers: Int[Array, " b"]
) -> tuple[Int[Array, " b"], Float[Array, " b"]]:
    """A token for every row and its log-prob under what it was drawn from; `numbers` counts each row's draws.

    A row with temperature 0 takes the likeliest word, and the log-prob is the one at temperature 1.
    """
    greedy = choices.temperatures == 0
    # Below 0 before they are divided: no temperature, however low, makes infinities of them.
    scores = logits.astype(jnp.float32)
    scores = (scores - scores.max(-1, keepdims=True)) / jnp.where(greedy, 1, choices.temperatures)[
        :, None
    ]
    cut = ~greedy & ((choices.top_k > 0) | (choices.top_p < 1))
    scores = jax.lax.cond(
        cut.any(), lambda x: jnp.where(cut[:, None], _cut(x, choices), x), lambda x: x, scores
    )
    keys = jax.vmap(lambda seed, number: jax.random.fold_in(jax.random.key(seed), number))(
        choices.seeds, numbers
    )
    token, total = _draw(jnp.exp(scores), jax.vmap(jax.random.uniform)(keys))
    token = jax.lax.cond(
        greedy.any(), lambda: jnp.where(greedy, jnp.argmax(scores, -1), token), lambda: token
    )
    return token, jnp.take_along_axis(scores, token[:, None], 1)[:, 0] - jnp.log(total)


def _draw(
    weights: Float[Array, "b v"], uniforms: Float[Array, " b"]
) -> tuple[Int[Array, " b"], Float[Array, " b"]]:
    """The word at which the running sum of the weights passes a share `uniforms` of their total, and that total.

    One number a row, where noise for every word would cost more than the vocabulary's product does. Sums run over blocks, then in one.
    A running sum moves by rounding where a weight is 0, too: only what has a weight can be passed.
    """
    b, v = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -v % _BLOCK))).reshape(b, -1, _BLOCK)
    sums = blocks.sum(-1)
    ends = jnp.where(sums > 0, jnp.cumsum(sums, -1), 0)
    total = ends.max(-1)
    target = jnp.minimum(uniforms, 1 - 2**-24) * total
    block = jnp.argmax(ends > target[:, None], -1)
    before = jnp.where(jnp.arange(ends.shape[1]) < block[:, None], ends, 0).max(-1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
    # What is left for the block is at most its largest running sum, which rounding in another order may miss.
    sums = jnp.where(inside > 0, jnp.cumsum(inside, -1), 0)
    passed = sums > jnp.minimum(target - before, sums.max(-1) * (1 - 2**-23))[:, None]
    return block * _BLOCK + jnp.argmax(passed, -1), total


def _cut(scores: Float[Array, "b v"], choices: Choices) -> Float[Array, "b v"]:
    """Log-probs of the words that stay, -inf for the others. Words of equal probability stay or go together."""
    scores = jax.nn.log_softmax(scores)
    words = scores.shape[-1]
    wanted = jnp.where(choices.top_k > 0, jnp.minimum(choices.top_k, words), words)
    scores = _keep(scores, lambda stay: stay.sum(-1) >= wanted)
    # What float32 loses in a sum must not cost a word; and however small the share is, one word stays.
    share = jnp.where(choices.top_p < 1, jnp.maximum(choices.top_p - 1e-6, 1e-9), jnp.inf)
    return _keep(scores, lambda stay: jnp.where(stay, jnp.exp(scores), 0).sum(-1) >= share)


def _keep(
    scores: Float[Array, "b v"], enough: Callable[[Bool[Array, "b v"]], Bool[Array, " b"]]
) -> Float[Array, "b v"]:
    """Log-probs of the fewest likeliest words that are enough (all, where none are)."""
    order = _order(scores)

    def halve(_, bounds):
        low, high = bounds  # `low` keeps enough words, `high` may not
        middle = low + (high - low) // 2
        good = enough(order >= middle[:, None])
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    rows = scores.shape[:1]
    low, _ = jax.lax.fori_loop(
        0, 32, halve, (jnp.zeros(rows, jnp.uint32), jnp.full(rows, jnp.uint32(2**32 - 1)))
    )
    return jax.nn.log_softmax(jnp.where(order >= low[:, None], scores, -jnp.inf))


def _order(scores: Float[Array, "b v"]) -> UInt32[Array, "b v"]:
    """Whole numbers in the order of the scores, which are at most 0: then their bits without the sign count down."""
    return jnp.uint32(2**31) - (
        jax.lax.bitcast_convert_type(scores, jnp.uint32) & jnp.uint32(2**31 - 1)
    )
