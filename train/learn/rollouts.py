"""The rollouts of a step: groups of episodes, their rewards and their metrics.

`roll_out` waits for the slowest rollout of a step while most slots are empty. With
`rl.max_staleness` above 0, rollouts outlive an update instead (`RolloutPool`), and twice as many
groups are in flight as an update takes:

    begin    as many new groups as were taken last begin
    play     all episodes advance, a quantum of virtual time at a time, until the update can be made
    take     the update takes the groups that are due, and those that ended first
    suspend  all others keep what they have drawn, and go on under the new weights

Between steps a pool is plain data: what every agent in flight was told. The next step goes on with
that, in the run itself and after a restart, so both compute the same.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Int32

from paravt_jax.method.judge import Judge
from paravt_jax.method.records import CallStatus, Episode, Question, StopReason
from paravt_jax.method.rewards import Rewards, published_format, score_all, tool_gap
from paravt_jax.processes import hosts
from rollout.agent.episode import Environment, seed_of
from rollout.engine.requests import Sampler
from train.learn.in_flight import (
    EpisodeInFlight,
    GroupInFlight,
    Player,
    PoolState,
    capacity,
    choose,
)
from train.learn.rl_settings import RLSettings

# Quanta in the tokens of the longest trajectory. After each, the processes wait for one another.
QUANTA = 32
# A quantum ends every request, and the rest of it is prefilled and decoded by further calls. With
# fewer tokens than these, calls take longer than what they compute.
LEAST_TOKENS = 32
# Reading frames and prefilling them costs this share of a quantum in virtual time.
CHARGE = 1 / 4


@dataclasses.dataclass(frozen=True)
class ScoredGroup:
    """The episodes on one question, with their rewards."""

    episodes: tuple[Episode, ...]
    rewards: tuple[Rewards, ...]
    players: tuple[int, ...] = ()
    """The process that played each episode; empty: there is only one."""


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Groups of episodes with their rewards, of all processes.

    Groups whose video cannot be read are left out; `unreadable` counts them.
    """

    groups: tuple[ScoredGroup, ...]
    unreadable: int = 0
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """Counts of the judge, and of what is in flight, of all processes."""

    @property
    def episodes(self) -> list[Episode]:
        """The episodes of all groups, in order."""
        return [episode for group in self.groups for episode in group.episodes]

    @property
    def rewards(self) -> list[Rewards]:
        """The rewards of these episodes."""
        return [reward for group in self.groups for reward in group.rewards]

    def without(self, groups: Sequence[int]) -> Rollouts:
        """Return all groups but those with these numbers, which count as unreadable."""
        kept = tuple(group for number, group in enumerate(self.groups) if number not in groups)
        unreadable = self.unreadable + len(self.groups) - len(kept)
        return dataclasses.replace(self, groups=kept, unreadable=unreadable)


def draw_budgets(settings: RLSettings, seed: int, step: int, prompts: int) -> list[int]:
    """Draw the number of overview frames K for each prompt of a step (nFrames gating)."""
    # A stream of its own for each step: every process draws the same, and so does a resumed run.
    # 0x4B sets it apart from other draws with the same seed and step.
    rng = np.random.default_rng([seed, step, 0x4B])
    return [int(k) for k in rng.choice(settings.frame_budgets, prompts)]


@runtime_checkable
class Questions(Protocol):
    """The questions of training, in an order that the seed fixes."""

    def draw(self, step: int) -> Sequence[Question]:
        """Draw a question for each prompt of a step: the same on every process."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Return the state from which `set_state` resumes with the question that comes next."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume at `state`."""
        ...


@dataclasses.dataclass(frozen=True)
class Actor:
    """Plays and scores episodes."""

    sampler: Sampler
    environment: Environment
    """The protocol, and the frames' features."""
    judge: Judge
    """Scores answers, by rules or by a model."""


def begin(
    questions: Sequence[Question],
    settings: RLSettings,
    seed: int,
    step: int,
    first: int = 0,
) -> list[GroupInFlight]:
    """Return a group of episodes for each question, which are not dealt to processes yet.

    Args:
        questions: The questions, on every process.
        settings: Group size and budgets.
        seed: Seed of the run.
        step: The step in which they begin.
        first: Number of the first question in the step. Seeds of episodes follow from the number.
    """
    budgets = draw_budgets(settings, seed, step, len(questions))
    groups = []
    for n, (question, frames) in enumerate(zip(questions, budgets, strict=True)):
        flights = tuple(
            EpisodeInFlight(seed_of(seed, step, first + n, g))
            for g in range(settings.grpo.group_size)
        )
        groups.append(GroupInFlight(n, question, frames, step, flights))
    return groups


def roll_out(actor: Actor, groups: Sequence[GroupInFlight], settings: RLSettings) -> Rollouts:
    """Play and score groups of episodes. All processes play their share of them.

    Args:
        actor: Plays and scores the episodes.
        groups: The groups, from `begin`, on every process.
        settings: Temperature and rewards.

    Returns:
        The rollouts of all processes.
    """
    player = Player(actor.environment, settings.temperature)
    player.deal(groups, now=0)
    player.play(actor.sampler, groups, math.inf)
    player.share(groups)
    return score(actor, groups, settings)


def score(actor: Actor, groups: Sequence[GroupInFlight], settings: RLSettings) -> Rollouts:
    """Return groups that have ended, with their rewards.

    One process scores all episodes of a group: a judge may score the same answer in two ways, if it
    is asked twice.
    """
    readable = [
        group
        for group in groups
        if all(episode.stop is not StopReason.UNREADABLE for episode in group.episodes)
    ]
    own = [group for group in readable if group.flights[0].process == hosts.process_index()]
    # A judge is asked about all answers at once.
    scored = iter(_rewards(actor, [e for group in own for e in group.episodes], settings))
    by_group = {group.number: tuple(next(scored) for _ in group.flights) for group in own}
    rewards: dict[int, tuple[Rewards, ...]] = {}
    judged: collections.Counter[str] = collections.Counter()
    for others, counts in hosts.gather((by_group, actor.judge.metrics())):
        rewards |= others
        judged.update(counts)
    scored_groups = []
    for group in readable:
        players = tuple(flight.process or 0 for flight in group.flights)
        scored_groups.append(ScoredGroup(group.episodes, rewards[group.number], players))
    return Rollouts(tuple(scored_groups), len(groups) - len(readable), dict(judged))


@functools.partial(jax.profiler.annotate_function, name="reward")
def _rewards(actor: Actor, episodes: Sequence[Episode], settings: RLSettings) -> list[Rewards]:
    played = [(episode.question, episode.turns) for episode in episodes]
    return score_all(played, settings.rewards, actor.judge, settings.grpo.sequence_anchor)


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
        trajectory_tokens = environment.protocol.settings.trajectory_tokens
        quantum = max(LEAST_TOKENS, trajectory_tokens // QUANTA)
        if self._player is None:
            charge = round(quantum * CHARGE)
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
            taken = choose(groups, step, settings.prompts, settings.max_staleness)
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


def require_fresh(rollouts: Rollouts, version: int, max_staleness: int) -> None:
    """Raise ValueError if a token is too old, or newer than the update of `version`."""
    for ages in token_ages(rollouts, version):
        wrong = ages[(ages < 0) | (ages > max_staleness)]
        if wrong.size:
            raise ValueError(
                f"rl: a token of version {version - wrong[0]} of the weights in the update of "
                f"version {version}, with rl.max_staleness {max_staleness}; load the current "
                "weights into the engine, and roll out again"
            )


def token_ages(rollouts: Rollouts, version: int) -> list[Int32[np.ndarray, " t"]]:
    """Return the age of each sampled token in the update of `version`, by trajectory."""
    versions = (episode.trajectory.versions for episode in rollouts.episodes)
    return [version - sampled[sampled >= 0] for sampled in versions]


def describe(rollouts: Rollouts) -> dict[str, float]:
    """Return the metrics of a step's episodes, under the names that the report reads.

    The metrics of a frame budget K are prefixed with it, as in `k4/accuracy`.
    """
    episodes = rollouts.episodes
    rewards = rollouts.rewards
    outcomes = [outcome for episode in episodes for turn in episode.turns for outcome in turn.calls]
    metrics = _headline(episodes, rewards)
    for name in ("accuracy", "format", "anchor", "tool", "total"):
        metrics[f"reward/{name}"] = _mean([getattr(reward, name) for reward in rewards])
    # The paper's f is the mean of this over training. It does not depend on the run's own rewards.
    metrics["format_reward"] = _mean([published_format(episode.turns) for episode in episodes])
    metrics["reward/format_capped"] = _mean([reward.capped for reward in rewards])
    metrics["length/response"] = _mean([response_tokens(episode) for episode in episodes])
    metrics["length/turns"] = _mean([len(episode.turns) for episode in episodes])
    metrics["k/mean"] = _mean([episode.frames for episode in episodes])
    metrics["calls/refused"] = _mean([not outcome.status.executed for outcome in outcomes])
    metrics["groups/unreadable"] = float(rollouts.unreadable)
    for k in sorted({episode.frames for episode in episodes}):
        members = [n for n, episode in enumerate(episodes) if episode.frames == k]
        at_k = ([episodes[n] for n in members], [rewards[n] for n in members])
        figures = _headline(*at_k) | _tool_gap(*at_k)
        metrics |= {f"k{k}/{name}": value for name, value in figures.items()}
    for status in CallStatus:
        metrics[f"call/{status}"] = _mean([outcome.status is status for outcome in outcomes])
    for reason in StopReason:
        metrics[f"stop/{reason}"] = _mean([episode.stop is reason for episode in episodes])
    return metrics


def _headline(episodes: Sequence[Episode], rewards: Sequence[Rewards]) -> dict[str, float]:
    return {
        "accuracy": _mean([reward.accuracy for reward in rewards]),
        "compliance": _mean([reward.compliant for reward in rewards]),
        "calls": _mean([episode.executed_calls for episode in episodes]),
    }


def _tool_gap(episodes: Sequence[Episode], rewards: Sequence[Rewards]) -> dict[str, float]:
    """Return what rollouts with calls earn more than those without, and the number of rollouts.

    The gaps are missing if all rollouts call, or none does.
    """
    figures = {
        "rollouts": float(len(episodes)),
        "rollouts_with_calls": float(sum(episode.executed_calls > 0 for episode in episodes)),
    }
    for name, values in (
        ("tool_gap", [reward.total for reward in rewards]),
        ("tool_gap_accuracy", [reward.accuracy for reward in rewards]),
    ):
        gap = tool_gap(values, episodes)
        if gap is not None:
            figures[name] = gap
    return figures


def response_tokens(episode: Episode) -> int:
    """Count the tokens that the main agent sampled."""
    segments = episode.trajectory.segments
    return sum(len(segment.ids) for segment in segments if segment.logprobs is not None)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
