"""A step's rollouts: groups of episodes, what they earned, and what is said about them.

Owns the draw of each prompt's overview budget, the groups and their metrics. Invariant: what is drawn is a function of (seed, step)
alone, so every host draws the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from paravt_jax.method.judge import Judge
from paravt_jax.method.records import CallStatus, Episode, Question, StopReason, Trajectory
from paravt_jax.method.rewards import Rewards, score_all
from rollout.agent.episode import Environment, EpisodeSettings, play
from rollout.agent.scoring import executed_calls, seed_of
from rollout.engine.requests import Sampler, run
from train.durable import hosts
from train.learn.rl_settings import RLSettings


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """A step's groups of episodes, or this process's share of them, and what each earned; groups whose video could not be read are left
    out and counted."""

    groups: tuple[tuple[Episode, ...], ...]
    rewards: tuple[tuple[Rewards, ...], ...]
    unreadable: int = 0

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.groups for episode in group]

    @property
    def subagents(self) -> list[tuple[int, Trajectory]]:
        """Every sub-agent that reported, with the number of its episode."""
        return [
            (n, outcome.subagent)
            for n, episode in enumerate(self.episodes)
            for turn in episode.turns
            for outcome in turn.calls
            if outcome.status.executed and outcome.subagent is not None
        ]


def draw_budgets(settings: RLSettings, seed: int, step: int, prompts: int) -> list[int]:
    """K of each prompt of a step, shared by its group (paper, nFrames gating)."""
    return [
        int(k)
        for k in np.random.default_rng([seed, step, 0x4B]).choice(settings.frame_budgets, prompts)
    ]


def roll_out(
    engine: Sampler,
    environment: Environment,
    questions: Sequence[Question],
    settings: RLSettings,
    seed: int,
    step: int,
    judge: Judge | None = None,
) -> Rollouts:
    """Play a group of episodes on every question that is this process's, and score them. `questions` are those of the whole step."""
    budgets, size = draw_budgets(settings, seed, step, len(questions)), settings.grpo.group_size
    mine = [*enumerate(zip(questions, budgets, strict=True))][hosts.share_of(len(questions))]
    agents = [
        play(
            environment,
            question,
            EpisodeSettings(budget, settings.temperature),
            seed_of(seed, step, n, g),
        )
        for n, (question, budget) in mine
        for g in range(size)
    ]
    episodes = run(engine, agents)
    groups = [tuple(episodes[n * size : (n + 1) * size]) for n in range(len(mine))]
    readable = tuple(
        group for group in groups if all(e.stop is not StopReason.UNREADABLE for e in group)
    )
    earned = score_all(
        [(e.question, e.turns) for group in readable for e in group],
        settings.rewards,
        judge,
        settings.grpo.sequence_anchor,
    )
    scored = tuple(tuple(earned[n * size : (n + 1) * size]) for n in range(len(readable)))
    return Rollouts(readable, scored, len(groups) - len(readable))


def join(parts: Sequence[Rollouts]) -> Rollouts:
    """The whole step's rollouts, from every process's own."""
    groups, rewards = (
        tuple(x for part in parts for x in getattr(part, name)) for name in ("groups", "rewards")
    )
    return Rollouts(groups, rewards, sum(part.unreadable for part in parts))


def require_current(rollouts: Rollouts, version: int) -> None:
    """Raises ValueError where a token was sampled under other weights than those of `version`."""
    trajectories = [e.trajectory for e in rollouts.episodes] + [t for _, t in rollouts.subagents]
    others = [t.version for t in trajectories if t.version not in (version, None)]
    if others:
        raise ValueError(
            f"rl: rollouts of version {others[0]} of the weights reached the update of version {version}; "
            "load the current weights into the engine, and roll out again"
        )


def describe(rollouts: Rollouts) -> dict[str, float]:
    """What the episodes of a step were like, under the names the report knows; figures of each K under `k4/...` and so on."""
    episodes, rewards = (
        rollouts.episodes,
        [reward for group in rollouts.rewards for reward in group],
    )
    outcomes = [outcome for episode in episodes for turn in episode.turns for outcome in turn.calls]
    described = {
        **_headline(episodes, rewards),
        **{
            f"reward/{name}": _mean([getattr(r, name) for r in rewards])
            for name in ("accuracy", "format", "anchor", "tool", "total")
        },
        "reward/format_capped": _mean([r.capped for r in rewards]),
        "length/response": _mean(
            [
                float(np.sum([len(s.ids) for s in e.trajectory.segments if s.logprobs is not None]))
                for e in episodes
            ]
        ),
        "length/turns": _mean([len(e.turns) for e in episodes]),
        "k/mean": _mean([e.frames for e in episodes]),
        "calls/refused": _mean([not outcome.status.executed for outcome in outcomes]),
        "groups/unreadable": float(rollouts.unreadable),
    }
    for k in sorted({e.frames for e in episodes}):
        mine = [(e, r) for e, r in zip(episodes, rewards, strict=True) if e.frames == k]
        figures = _headline([e for e, _ in mine], [r for _, r in mine])
        described |= {f"k{k}/{name}": value for name, value in figures.items()} | {
            f"k{k}/rollouts": float(len(mine))
        }
    described |= {
        f"call/{status}": _mean([outcome.status is status for outcome in outcomes])
        for status in CallStatus
    }
    return described | {
        f"stop/{reason}": _mean([e.stop is reason for e in episodes]) for reason in StopReason
    }


def _headline(episodes: Sequence[Episode], rewards: Sequence[Rewards]) -> dict[str, float]:
    return {
        "accuracy": _mean([r.accuracy for r in rewards]),
        "format": _mean([r.compliant for r in rewards]),
        "calls": _mean([executed_calls(e) for e in episodes]),
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
