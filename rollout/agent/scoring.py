"""Seeds of episodes, and what is counted in them, for training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paravt_jax.method.records import Episode


def seed_of(*identity: int | str) -> int:
    """Derive a 32-bit seed from what identifies a sample, such as run, step, question, rollout."""
    numbers = [
        value if isinstance(value, int) else int.from_bytes(value.encode(), "little")
        for value in identity
    ]
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def executed_calls(episode: Episode) -> int:
    """Return the number of tool calls of an episode that were carried out."""
    return sum(calls_by_turn(episode))


def calls_by_turn(episode: Episode) -> list[int]:
    """Return the number of tool calls that were carried out, by turn of the main agent."""
    return [sum(outcome.status.executed for outcome in turn.calls) for turn in episode.turns]


def tool_gap(values: Sequence[float], episodes: Sequence[Episode]) -> float | None:
    """Mean value of the episodes that call a tool, minus that of the episodes that do not.

    Only executed calls count. The gap is None if one of the two sides has no episode.

    Args:
        values: A reward or score of each episode.
        episodes: The episodes.
    """
    called = [executed_calls(episode) > 0 for episode in episodes]
    with_calls = [value for value, yes in zip(values, called, strict=True) if yes]
    without = [value for value, yes in zip(values, called, strict=True) if not yes]
    if not with_calls or not without:
        return None
    return float(np.mean(with_calls) - np.mean(without))
