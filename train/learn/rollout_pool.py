"""Rollouts that outlive an update (`rl.max_staleness` above 0).

Without a pool, every step waits for its slowest rollout while most slots are empty. With it, twice
as many groups are in flight as an update takes:

    begin    as many new groups as were taken last begin
    play     all episodes advance, a quantum of virtual time at a time, until the update can be made
    take     the update takes the groups that are due, and those that ended first
    suspend  all others keep what they have drawn, and go on under the new weights

Between steps a pool is plain data: what every agent in flight was told. The next step goes on with
that, in the run itself and after a restart, so both compute the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from paravt_jax.method.records import StopReason
from train.learn.in_flight import (
    EpisodeInFlight,
    GroupInFlight,
    GroupProgress,
    Player,
    capacity,
    choose,
)
from train.learn.rl_settings import RLSettings
from train.learn.rollouts import (
    Actor,
    Questions,
    Rollouts,
    begin,
    response_tokens,
    score,
    token_ages,
)

# Quanta in the tokens of the longest trajectory. After each, the processes wait for one another.
QUANTA = 32
# A quantum ends every request, and the rest of it is prefilled and decoded by further calls. With
# fewer tokens than these, calls take longer than what they compute.
LEAST_TOKENS = 32
# Reading frames and prefilling them costs this share of a quantum in virtual time.
CHARGE = 1 / 4


def virtual_times(trajectory_tokens: int) -> tuple[int, int]:
    """Return the quantum, and the charge for reading frames, for trajectories of this length."""
    quantum = max(LEAST_TOKENS, trajectory_tokens // QUANTA)
    return quantum, round(quantum * CHARGE)


@dataclasses.dataclass(frozen=True)
class PoolState:
    """A pool between two steps."""

    clock: int = 0
    """The virtual time."""
    number: int = 0
    """Number of groups that have begun."""
    groups: tuple[GroupInFlight, ...] = ()
    """The groups in flight."""


class RolloutPool:
    """The groups in flight. Every process has the same."""

    def __init__(self, state: PoolState | None = None):
        self.state = state or PoolState()
        # Kept for the agents that go on in the same process.
        self._player: Player | None = None

    def play_step(
        self, actor: Actor, questions: Questions, settings: RLSettings, seed: int, step: int
    ) -> Rollouts:
        """Play until the update of `step` can be made, and take its groups.

        Args:
            actor: Samples under the weights after `step` updates. It is idle between steps.
            questions: Draws questions for the groups that begin. The first step fills the pool, and
                so draws twice.
            settings: Settings of RL.
            seed: Seed of the run.
            step: Number of the step.
        """
        environment = actor.environment
        quantum, charge = virtual_times(environment.protocol.settings.trajectory_tokens)
        if self._player is None:
            self._player = Player(environment, settings.temperature, charge)
        clock, number, groups = self.state.clock, self.state.number, [*self.state.groups]
        first = 0
        while len(groups) < capacity(settings.prompts, settings.max_staleness):
            for group in begin(questions.draw(step), settings, seed, step, first):
                groups.append(dataclasses.replace(group, number=number, began=clock))
                number += 1
            first += settings.prompts
        self._player.deal(groups, clock)
        while True:
            progress = [GroupProgress(group.step, group.end) for group in groups]
            taken = choose(progress, step, settings.prompts, settings.max_staleness)
            if taken is not None:
                break
            clock += quantum
            self._player.play(actor.sampler, groups, clock)
        flights = [flight for group in groups for flight in group.flights]
        ended = [flight for flight in flights if flight.done and flight.episode is None]
        self._player.share(groups)
        rollouts = score(actor, [groups[n] for n in taken], settings)
        left = tuple(group for n, group in enumerate(groups) if n not in taken)
        self.state = PoolState(clock, number, left)
        metrics = rollouts.metrics | _staleness(rollouts, step, settings.max_staleness)
        # Groups that outlive the update.
        metrics |= _sampled(ended) | {"in_flight/groups": float(len(left))}
        return dataclasses.replace(rollouts, metrics=metrics)


def _staleness(rollouts: Rollouts, step: int, max_staleness: int) -> dict[str, float]:
    """Return the ages of the batch's sampled tokens, in updates; nothing if there are none."""
    ages = np.concatenate([np.zeros(0, np.int32), *token_ages(rollouts, step)])
    if not ages.size:
        return {}
    shares = {
        f"staleness/age{age}": float((ages == age).mean()) for age in range(max_staleness + 1)
    }
    return shares | {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}


def _sampled(ended: Sequence[EpisodeInFlight]) -> dict[str, float]:
    """Return the number and mean length of the episodes that ended in this step, taken or not.

    If the trained ones (`length/response`) stayed shorter, the choice of groups would be biased.
    """
    tokens = [
        response_tokens(flight.episode)
        for flight in ended
        if flight.episode is not None and flight.episode.stop is not StopReason.UNREADABLE
    ]
    figures = {"in_flight/ended": float(len(tokens))}
    return figures | {"length/sampled": float(np.mean(tokens))} if tokens else figures
