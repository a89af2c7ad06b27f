"""The rollouts of a step: groups of episodes, their rewards and their metrics."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from paravt_jax.method import grpo
from paravt_jax.method.judge import Judge
from paravt_jax.method.records import CallStatus, Episode, Question, StopReason, Trajectory
from paravt_jax.method.rewards import (
    Rewards,
    combine,
    final_answer,
    published_format,
    subtract_overlong_penalty,
)
from paravt_jax.processes import hosts
from rollout.agent.episode import Environment, EpisodeSettings, play, suffix_length
from rollout.agent.scoring import executed_calls, seed_of, tool_gap
from rollout.engine.requests import Sampler, run
from train.learn.rl_settings import RLSettings

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Groups of episodes with their rewards, of a whole step or of one process.

    Groups whose video cannot be read are left out; `unreadable` counts them.
    """

    groups: tuple[tuple[Episode, ...], ...]
    rewards: tuple[tuple[Rewards, ...], ...]
    unreadable: int = 0
    places: tuple[int, ...] = ()
    """The place of each group among the prompts of the step."""

    @property
    def episodes(self) -> list[Episode]:
        """The episodes of all groups, in order."""
        return [episode for group in self.groups for episode in group]

    @property
    def subagents(self) -> list[tuple[int, Trajectory]]:
        """The sub-agents that returned a report, each with the number of its episode."""
        found = []
        for number, episode in enumerate(self.episodes):
            for turn in episode.turns:
                for outcome in turn.calls:
                    if outcome.status.executed and outcome.subagent is not None:
                        found.append((number, outcome.subagent))
        return found


def draw_budgets(settings: RLSettings, seed: int, step: int, prompts: int) -> list[int]:
    """Draw the number of overview frames K for each prompt of a step (nFrames gating)."""
    # A stream of its own for each step: every process draws the same, and so does a resumed run.
    # 0x4B sets it apart from other draws with the same seed and step.
    rng = np.random.default_rng([seed, step, 0x4B])
    return [int(k) for k in rng.choice(settings.frame_budgets, prompts)]


def roll_out(
    engine: Sampler,
    environment: Environment,
    questions: Sequence[Question],
    settings: RLSettings,
    seed: int,
    step: int,
    judge: Judge,
    places: Sequence[int] | None = None,
    first: int = 0,
) -> Rollouts:
    """Play and score a group of episodes on each of this process's questions.

    Args:
        engine: Samples the agents' responses.
        environment: The protocol, and the frames' features.
        questions: Questions of the whole step, or further ones, on every process.
        settings: Group size, budgets, temperature and rewards.
        seed: Seed of the run.
        step: Number of the step.
        judge: Scores answers.
        places: Each question's place among the prompts of the step, which decides its budget and
            its process. None: all places, in order.
        first: Number of the first question in the step. Seeds of episodes follow from the number.

    Returns:
        This process's rollouts.
    """
    size = settings.grpo.group_size
    prompts = len(questions) if places is None else settings.prompts
    share = hosts.share_of(prompts)
    own = range(prompts)[share]
    budgets = draw_budgets(settings, seed, step, prompts)
    agents = []
    played_places = []
    # Numbered before they are shared out, so that seeds do not depend on the number of processes.
    for n, (place, question) in enumerate(zip(places or range(prompts), questions, strict=True)):
        if place not in own:
            continue
        played_places.append(place)
        setting = EpisodeSettings(budgets[place], settings.temperature)
        for g in range(size):
            agents.append(play(environment, question, setting, seed_of(seed, step, first + n, g)))
    groups = _grouped(run(engine, agents), size)
    read = [all(e.stop is not StopReason.UNREADABLE for e in group) for group in groups]
    readable = tuple(itertools.compress(groups, read))
    episodes = [episode for group in readable for episode in group]
    limit = environment.protocol.settings.trajectory_tokens
    return Rollouts(
        readable,
        _grouped(_scored(episodes, settings, judge, limit), size),
        read.count(False),
        tuple(itertools.compress(played_places, read)),
    )


def _scored(
    episodes: Sequence[Episode], settings: RLSettings, judge: Judge, limit: int
) -> list[Rewards]:
    """The rewards of episodes whose trajectories have at most `limit` tokens."""
    items = [(episode.question, final_answer(episode.turns)) for episode in episodes]
    rewards = []
    for episode, r_acc in zip(episodes, judge.scores(items), strict=True):
        earned = combine(episode.turns, r_acc, settings.rewards, settings.grpo.sequence_anchor)
        tokens = suffix_length(episode.trajectory)
        rewards.append(subtract_overlong_penalty(earned, tokens, limit, settings.rewards))
    return rewards


@dataclasses.dataclass(frozen=True)
class StepRollouts:
    """The rollouts of a step, on every process."""

    by_process: tuple[Rollouts, ...]
    """The batch: the rollouts of each process."""
    drawn: Rollouts
    """The rollouts on the questions that were drawn first, a fair sample; the batch may differ."""
    metrics: dict[str, float]
    """Counts of further questions, and of the judge."""


def play_step(
    play: Callable[..., Rollouts],
    questions: Sequence[Question],
    further: Callable[[Sequence[int]], Sequence[Question]] | None,
    settings: RLSettings,
    judge: Judge,
) -> StepRollouts:
    """Play a step's episodes, with dynamic sampling (DAPO, arXiv:2503.14476, section 3.2).

    In at most `settings.dynamic_sampling` rounds, further questions take the places of those
    without signal: all rewards of the group are equal, or the video cannot be read. All processes
    decide alike, because they see all rewards.

    Args:
        play: `play(questions)` and `play(questions, places=..., first=...)` play this process's
            share, as `roll_out` does.
        questions: The questions of the step.
        further: Draws a further question for each of some places; needed for dynamic sampling.
        settings: Settings of RL.
        judge: The judge that `play` uses. Its counts are added up.
    """
    counts: collections.Counter[str] = collections.Counter()

    def play_everywhere(questions: Sequence[Question], **places: Any) -> tuple[Rollouts, ...]:
        own = play(questions, **places)
        parts = hosts.gather((own, judge.metrics()))
        for _, judged in parts:
            counts.update(judged)
        return tuple(rollouts for rollouts, _ in parts)

    parts = drawn = play_everywhere(questions)
    if settings.dynamic_sampling:
        assert further is not None, "dynamic sampling draws further questions"
        open_places = _without_signal(join(parts), len(questions), settings)
        counts["groups/replaced"] = len(open_places)
        counts["groups/further"] = 0
        for _ in range(settings.dynamic_sampling):
            if not open_places:
                break
            first = len(questions) + counts["groups/further"]
            fresh = play_everywhere(further(open_places), places=open_places, first=first)
            counts["groups/further"] += len(open_places)
            parts = tuple(_replaced(old, new) for old, new in zip(parts, fresh, strict=True))
            open_places = _without_signal(join(parts), len(questions), settings)
        counts["groups/replaced"] -= len(open_places)
    metrics = {name: float(count) for name, count in counts.items()}
    return StepRollouts(parts, join(drawn), metrics)


def _without_signal(rollouts: Rollouts, prompts: int, settings: RLSettings) -> list[int]:
    """The places whose group is silent or missing."""
    rewards = np.zeros((prompts, settings.grpo.group_size), np.float32)
    valid = np.zeros(rewards.shape, bool)
    for place, group in zip(rollouts.places, rollouts.rewards, strict=True):
        rewards[place] = [reward.total for reward in group]
        valid[place] = True
    signal = grpo.has_signal(jnp.asarray(rewards), jnp.asarray(valid), settings.grpo)
    return np.flatnonzero(~np.asarray(signal)).tolist()


def _replaced(old: Rollouts, new: Rollouts) -> Rollouts:
    """The groups of both in the order of their places; of two at one place, the new one."""
    groups = {
        place: (group, rewards)
        for part in (old, new)
        for place, group, rewards in zip(part.places, part.groups, part.rewards, strict=True)
    }
    places = tuple(sorted(groups))
    return Rollouts(
        tuple(groups[place][0] for place in places),
        tuple(groups[place][1] for place in places),
        old.unreadable + new.unreadable,
        places,
    )


def _grouped(items: Sequence[T], size: int) -> tuple[tuple[T, ...], ...]:
    """Consecutive items in groups of `size`."""
    starts = range(0, len(items), size)
    return tuple(tuple(items[start : start + size]) for start in starts)


def join(parts: Sequence[Rollouts]) -> Rollouts:
    """Join the rollouts of all processes, in their order."""
    groups = tuple(group for part in parts for group in part.groups)
    rewards = tuple(group for part in parts for group in part.rewards)
    places = tuple(place for part in parts for place in part.places)
    return Rollouts(groups, rewards, sum(part.unreadable for part in parts), places)


def require_current(rollouts: Rollouts, version: int) -> None:
    """Raise ValueError if a token was sampled under weights of another version."""
    trajectories = [episode.trajectory for episode in rollouts.episodes]
    trajectories += [trajectory for _, trajectory in rollouts.subagents]
    for trajectory in trajectories:
        # None: nothing in it was sampled.
        if trajectory.version not in (version, None):
            raise ValueError(
                f"rl: rollouts of version {trajectory.version} of the weights in the update of "
                f"version {version}; load the current weights into the engine, and roll out again"
            )


def describe(rollouts: Rollouts) -> dict[str, float]:
    """Metrics of a step's episodes, under the names that the report reads.

    The metrics of a frame budget K are prefixed with it, as in `k4/accuracy`.
    """
    episodes = rollouts.episodes
    rewards = [reward for group in rollouts.rewards for reward in group]
    outcomes = [outcome for episode in episodes for turn in episode.turns for outcome in turn.calls]
    metrics = _headline(episodes, rewards)
    for name in ("accuracy", "format", "anchor", "tool", "total"):
        metrics[f"reward/{name}"] = _mean([getattr(reward, name) for reward in rewards])
    overlong = [reward.overlong for reward in rewards if reward.overlong is not None]
    if overlong:
        metrics["reward/overlong"] = _mean(overlong)
    # The paper's f is the mean of this over training. It does not depend on the run's own rewards.
    metrics["format_reward"] = _mean([published_format(episode.turns) for episode in episodes])
    metrics["reward/format_capped"] = _mean([reward.capped for reward in rewards])
    metrics["length/response"] = _mean([_response_tokens(episode) for episode in episodes])
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
        "calls": _mean([executed_calls(episode) for episode in episodes]),
    }


def _tool_gap(episodes: Sequence[Episode], rewards: Sequence[Rewards]) -> dict[str, float]:
    """What rollouts with calls earn more than those without, and the number of rollouts.

    The gaps are missing if all rollouts call, or none does.
    """
    figures = {
        "rollouts": float(len(episodes)),
        "rollouts_with_calls": float(sum(executed_calls(episode) > 0 for episode in episodes)),
    }
    for name, values in (
        ("tool_gap", [reward.total for reward in rewards]),
        ("tool_gap_accuracy", [reward.accuracy for reward in rewards]),
    ):
        gap = tool_gap(values, episodes)
        if gap is not None:
            figures[name] = gap
    return figures


def _response_tokens(episode: Episode) -> int:
    """Tokens that the main agent sampled."""
    segments = episode.trajectory.segments
    return sum(len(segment.ids) for segment in segments if segment.logprobs is not None)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
