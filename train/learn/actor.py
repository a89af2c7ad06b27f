"""What plays episodes: a sampler, what it sees with, and how it gets new weights."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

from paravt_jax.method.judge import Judge
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.method.scoring import rules_of
from rollout.agent.episode import Environment
from rollout.engine.requests import Sampler
from train.learn.weight_sync import WeightSync


@runtime_checkable
class TrainedSampler(Sampler, Protocol):
    """A sampler that gets new weights after each step: the engine, or a script in a test."""

    def sleep(self) -> None:
        """Free weights and KV cache until the next `load`."""
        ...

    def load(self, weights: Any, version: int) -> None:
        """Sample under `weights`, those after `version` steps, from now on."""
        ...

    def fingerprint(self) -> int:
        """Return the fingerprint of the weights that are sampled from (`models.fingerprint`)."""
        ...


@dataclasses.dataclass(frozen=True)
class Actor:
    """Plays and scores episodes."""

    sampler: TrainedSampler
    environment: Environment
    """The protocol, and the frames' features."""
    sync: WeightSync
    """Brings weights from the mesh of training to the sampler."""
    judge: Judge | None = None
    """Scores answers; None: by rules."""

    def judge_of(self, rewards: RewardSettings) -> Judge:
        """Return what scores answers under these settings."""
        return self.judge or rules_of(rewards)

    def sleep(self) -> None:
        """Free the sampler's memory until the next `load`."""
        self.sampler.sleep()

    def load(self, weights: Any, version: int) -> int:
        """Load trained weights; samples then report `version`.

        Returns:
            The fingerprint of all weights.

        Raises:
            ValueError: The sampler of a process has other weights; raised in all processes.
        """
        # Free the old weights first: memory may not hold both.
        self.sampler.sleep()
        return self.sync.load(self.sampler, weights, version, self.environment.features)
