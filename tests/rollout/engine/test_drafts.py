"""Drafts by hand and against a plain search, and what is accepted of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import numpy as np

from rollout.engine.drafts import LONGEST_MATCH, SEPARATOR, accepted, build_history, propose

SIZE = 24
draft = jax.jit(propose, static_argnums=2)
accept = jax.jit(accepted)


def drafts(history: Sequence[int], count: int = 3) -> list[int]:
    """Drafts of one row; what lies beyond its history repeats its last token."""
    padded = np.full((1, SIZE), history[-1] if history else 0, np.int32)
    padded[0, : len(history)] = history
    return draft(padded, np.array([len(history)], np.int32), count)[0].tolist()


def test_drafts_by_hand():
    # After the longest match, even if another is later; of equal ones after the latest.
    assert drafts([1, 2, 3, 7, 2, 4, 1, 2]) == [3, 7, 2]
    assert drafts([1, 2, 3, SEPARATOR, 1, 2, 4, SEPARATOR, 1, 2]) == [4, SEPARATOR, 1]
    # Nothing is known beyond the last token, nor beyond the end of a sibling.
    assert drafts([5, 6, 5]) == [6, 5, SEPARATOR]
    assert drafts([1, 2, 3, SEPARATOR, 1, 2, SEPARATOR, 1, 2]) == [3, SEPARATOR, 1]
    assert drafts([]) == drafts([5]) == drafts([5, 6]) == [SEPARATOR] * 3


def plain_drafts(history: list[int], count: int) -> list[int]:
    best, found = 0, 0
    for place in range(1, len(history)):
        backs = range(1, min(LONGEST_MATCH, place) + 1)
        equal = (history[place - back] == history[-back] for back in backs)
        match = sum(itertools.takewhile(bool, equal))
        if history[place] != SEPARATOR and match >= max(best, 1):
            best, found = match, place
    following = history[found : found + count] if best else []
    return following + [SEPARATOR] * (count - len(following))


def test_drafts_are_those_of_a_plain_search():
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, SIZE + 1, 300).astype(np.int32)
    histories = rng.integers(-1, 3, (300, SIZE)).astype(np.int32)
    found = draft(histories, lengths, 5)
    for history, length, row in zip(histories, lengths, found, strict=True):
        assert row.tolist() == plain_drafts(history[:length].tolist(), 5)


def test_leading_drafts_are_accepted():
    drawn = np.array([[1, 2, 3]] * 4, np.int32)
    offered = np.array([[1, 2], [1, 9], [9, 2], [SEPARATOR, SEPARATOR]], np.int32)
    assert accept(drawn, offered).tolist() == [3, 2, 1, 1]


def test_a_history_has_the_newest_entries():
    own, siblings = np.array([5, 6, 7]), [np.array([1, 2]), np.array([3])]
    assert build_history(own, siblings, 8).tolist() == [1, 2, SEPARATOR, 3, SEPARATOR, 5, 6, 7]
    assert build_history(own, siblings, 6).tolist() == [SEPARATOR, 3, SEPARATOR, 5, 6, 7]
    assert build_history(own, siblings, 4).tolist() == [3, SEPARATOR, 6, 7]
    assert build_history(own, [], 2).tolist() == [6, 7]
