"""An episode's seed and its executed calls, for the learner and every evaluation."""

from __future__ import annotations

import numpy as np

from paravt_jax.method.records import Episode


def seed_of(*parts: int | str) -> int:
    """A 32-bit seed from what names a sample: run, step, question, rollout."""
    numbers = [
        part if isinstance(part, int) else int.from_bytes(part.encode(), "little") for part in parts
    ]
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def executed_calls(episode: Episode) -> int:
    """Tool calls of an episode that were carried out."""
    return sum(outcome.status.executed for turn in episode.turns for outcome in turn.calls)
