"""Drafts of coming tokens, for exact speculation where few rows still decode.

A token is a function of its row's seed, its number and the tokens before it (`sampling`). So a
draft is accepted exactly where it equals the token that is drawn in its place, and speculation
changes no token. Drafts are what followed the longest earlier match of a row's last tokens, in
the responses of others or in its own tokens:

    history   a b c d e -1 x b c        b c occurred before, and d e followed
    drafts    d e -1
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

SEPARATOR = -1
"""Ends each sibling's response in a history. No token equals it, so it is never accepted."""

LONGEST_MATCH = 4
"""Upper bound on the tokens that are compared."""


@jax.named_scope("propose")
def propose(
    history: Int32[Array, "r s"], length: Int32[Array, " r"], count: int
) -> Int32[Array, "r count"]:
    """Return what followed the longest earlier match of each row's last tokens; the latest of them.

    Args:
        history: other texts, then the row's own tokens; see `build_history`.
        length: entries of `history` that are used. What lies beyond is ignored.
        count: drafts per row.

    Returns:
        The drafts; -1 where there is none: feed any token in its place, it is not accepted.
    """
    return jax.vmap(lambda texts, used: _propose_one(texts, used, count))(history, length)


def _propose_one(
    history: Int32[Array, " s"], length: Int32[Array, ""], count: int
) -> Int32[Array, " count"]:
    (size,) = history.shape
    places = jnp.arange(size)
    # matching[p]: how many tokens before p equal the row's last ones. It is 0 where no token is
    # known at p: siblings that are decoded side by side often end alike, and nothing follows yet.
    matching = jnp.zeros(size, jnp.int32)
    agrees = (places < length) & (history != SEPARATOR)
    for back in range(1, LONGEST_MATCH + 1):
        agrees &= (places >= back) & (jnp.roll(history, back) == history[length - back])
        matching += agrees
    found = size - 1 - jnp.argmax(matching[::-1])
    following = found + jnp.arange(count)
    known = (matching[found] > 0) & (following < length)
    return jnp.where(known, history[following], SEPARATOR)


def accepted(drawn: Int32[Array, "r drawn"], drafts: Int32[Array, "r count"]) -> Int32[Array, " r"]:
    """Return how many drawn tokens count: one more than the leading drafts that were drawn.

    Args:
        drawn: per row, the token drawn after the last certain one, and after each draft.
        drafts: the drafts that were fed to the model.
    """
    equal = (drawn[:, :-1] == drafts).astype(jnp.int32)
    return 1 + jnp.cumprod(equal, axis=1).sum(axis=1)


def build_history(
    own: Int[np.ndarray, " t"], siblings: Sequence[Int[np.ndarray, " _"]], size: int
) -> Int32[np.ndarray, " s"]:
    """Return the siblings' responses and the row's own tokens, at most `size` entries.

    If they do not fit, the row's newest tokens get at least half of the entries, and the latest
    siblings the others: a prompt is often longer than all responses and helps less.

    Args:
        own: the row's prompt and response.
        siblings: responses of others, the most alike last.
        size: upper bound on the entries. Leave room for the tokens that the row will draw.
    """
    none = np.zeros(0, np.int32)
    others = np.concatenate([none, *(np.append(ids, SEPARATOR) for ids in siblings)])
    own = _newest(own, max(size - len(others), size // 2))
    others = _newest(others, size - len(own))
    return np.concatenate([others, own]).astype(np.int32)


def _newest(ids: Int[np.ndarray, " t"], count: int) -> Int[np.ndarray, " _"]:
    return ids[max(0, len(ids) - count) :]
