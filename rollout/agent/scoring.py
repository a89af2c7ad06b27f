"""Seeds of episodes and counts of their calls, for training and evaluation."""

from __future__ import annotations

import numpy as np

from paravt_jax.method.records import Episode


def seed_of(*parts: int | str) -> int:
    """Derive a 32-bit seed from what identifies a sample, such as run, step, question, rollout."""
    numbers = [
        part if isinstance(part, int) else int.from_bytes(part.encode(), "little") for part in parts
    ]
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def executed_calls(episode: Episode) -> int:
    """Number of tool calls of an episode that were carried out."""
    return sum(outcome.status.executed for turn in episode.turns for outcome in turn.calls)
