"""Plays questions and scores the episodes, with the same episode code as training.

Evaluations during a training run and `python -m rollout.evaluate` both call `play_and_score`. An
episode depends only on its question, settings, seed and weights, so several processes can share the
questions. Failures are values: a question comes back as `LeftOut` if its video cannot be read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any

from paravt_jax.method.accuracy import Rules, is_read
from paravt_jax.method.judge import Judge
from paravt_jax.method.records import Episode, Question, StopReason, Turn
from paravt_jax.method.rewards import Rewards, RewardSettings, final_answer, score_all
from rollout.agent.episode import Environment, EpisodeSettings, play, seed_of
from rollout.agent.transcript import overview_times
from rollout.engine.requests import Sampler, as_done


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How answers are read and scored.

    `rewards`, `judge` and `anchor_weight` are arguments of `score_all`.
    """

    rewards: RewardSettings = RewardSettings()
    judge: Judge = Rules()
    anchor_weight: float = 0.5
    read: Callable[[Sequence[Turn]], str | None] = final_answer
    """Finds the answer to score; None if there is none. By default only in an answer block, as in
    training."""


@dataclasses.dataclass(frozen=True)
class Played:
    """An episode with its rewards and the answer that was read from it."""

    episode: Episode
    rewards: Rewards
    read: str | None


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A question that was left out of the score."""

    question: Question
    cause: str
    """`missing` (no video file), `unreadable`, `broken` (its subtitles, or the span that is its
    answer), or `too_long`."""
    reason: str
    """What happened, for people."""


async def play_question(
    environment: Environment, question: Question, setting: EpisodeSettings, seed: int
) -> Episode | LeftOut:
    """Play the episode of a question.

    Args:
        environment: the protocol and the frame features.
        question: the question.
        setting: overview budget, dispatch and temperature.
        seed: combined with the question's id into the episode's seed.
    """
    episode = await play(environment, question, setting, seed_of(seed, question.id, 0))
    if episode.stop is StopReason.UNREADABLE:
        return LeftOut(question, "unreadable", episode.reason or "it can no longer be read")
    return episode


def play_and_score(
    sampler: Sampler,
    agents: Iterable[Coroutine[Any, Any, Episode | LeftOut]],
    scoring: Scoring,
    side_by_side: int | None = None,
) -> Iterator[tuple[int, Played | LeftOut]]:
    """Play episodes and score them.

    Args:
        sampler: the engine, or anything else that answers requests.
        agents: the episodes, from `play_question`.
        scoring: how answers are read and scored.
        side_by_side: number of episodes played at once; None plays all at once. An episode is taken
            from the iterable when there is room for it.

    Yields:
        (number, outcome), with the number of the episode in `agents`. With `side_by_side`, outcomes
        come as soon as they are done. Without it they come at the end, in order, and a judge gets
        all answers in one batch.
    """
    waiting: list[tuple[int, Episode | LeftOut]] = []
    with contextlib.closing(as_done(sampler, agents, side_by_side or sys.maxsize)) as finished:
        for batch in finished:
            waiting += batch
            if side_by_side is not None:
                yield from _score(waiting, scoring)
                waiting = []
    yield from _score(sorted(waiting, key=lambda done: done[0]), scoring)


def _score(
    done: Sequence[tuple[int, Episode | LeftOut]], scoring: Scoring
) -> Iterator[tuple[int, Played | LeftOut]]:
    """Score the episodes in one call of `score_all`, so that a judge gets them in one batch."""
    episodes = [outcome for _, outcome in done if isinstance(outcome, Episode)]
    answers = [scoring.read(episode.turns) for episode in episodes]
    earned = score_all(
        [(episode.question, episode.turns) for episode in episodes],
        scoring.rewards,
        scoring.judge,
        scoring.anchor_weight,
        answers,
    )
    scored = map(Played, episodes, earned, answers)
    for number, outcome in done:
        yield number, next(scored) if isinstance(outcome, Episode) else outcome


def measures(played: Played) -> dict[str, Any]:
    """Return the values of one episode that `rollout.evaluation.summary` averages."""
    episode, rewards, read = played.episode, played.rewards, played.read
    calls = [turn.executed_calls for turn in episode.turns]
    return {
        "video": episode.question.video,
        "kind": str(episode.question.kind),
        "score": rewards.accuracy,
        "read": read,
        "unread": read is not None and not is_read(episode.question, read),
        "compliant": rewards.compliant,
        "shown": overview_shows_answer(episode),
        "calls": sum(calls),
        "tool_turns": sum(count > 0 for count in calls),
        "parallel_turns": sum(count > 1 for count in calls),
        "turn_count": len(episode.turns),
        "stop": str(episode.stop),
    }


def overview_shows_answer(episode: Episode) -> bool | None:
    """Return whether an overview frame lies in the question's evidence; None if that is unknown.

    For temporal grounding, too, one frame is enough, although it does not tell the whole span.
    """
    if episode.question.evidence is None:
        return None
    first, last = episode.question.evidence
    return any(first <= time <= last for time in overview_times(episode))
