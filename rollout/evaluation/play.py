"""Plays questions under one setting and scores the episodes, with the episode code of training.

An evaluation during a run and `python -m rollout.evaluate` both go through `play_and_score`. An
episode depends on its question, the setting, the seed and the weights, not on what else is played,
so several processes can share the questions. Failures are values: a question whose video cannot be
read, or that a server refuses, comes back as `LeftOut`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from paravt_jax.data.frames import VideoError
from paravt_jax.method.accuracy import is_read
from paravt_jax.method.judge import Judge
from paravt_jax.method.parsing import TAG_PATTERN, extract_answer, find_calls, first_think
from paravt_jax.method.records import CallStatus, Episode, Question, StopReason, Turn
from paravt_jax.method.rewards import Rewards, RewardSettings, final_answer, score_all
from rollout.agent.episode import Dispatch, Environment, EpisodeSettings, play
from rollout.agent.scoring import executed_calls, seed_of
from rollout.engine.requests import Sampler, as_done


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Every combination of overview budget, dispatch and temperature is played on the first `questions` held-out questions.

    A temperature above 0 and parallel dispatch are the headline: those are played `samples` times a question.
    """

    questions: int = 64
    """Held-out questions that are asked, at most."""
    samples: int = 2
    """Episodes per question at temperatures above 0 with parallel dispatch; RL's group size side by side."""
    frames: tuple[int, ...] = (4, 16, 64)
    """Overview budgets K."""
    dispatch: tuple[Dispatch, ...] = ("parallel", "sequential", "none")
    """How calls are carried out."""
    temperatures: tuple[float, ...] = (0.7, 0.0)
    """Sampling temperatures; 0 is greedy."""

    def __post_init__(self):
        if min(self.questions, self.samples) < 1:
            raise ValueError(
                f"evaluation.questions, samples: {self.questions}, {self.samples}; both need at least 1"
            )
        self.episode_settings()  # refuses a K or a temperature that no episode can be played with

    def episode_settings(self) -> tuple[EpisodeSettings, ...]:
        return tuple(
            EpisodeSettings(k, t, d)
            for k in self.frames
            for d in self.dispatch
            for t in self.temperatures
        )


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How answers are read and scored.

    `rewards`, `judge` and `anchor_weight` are those of `score_all`. With `blocks_only`, as in
    training, an answer counts only in its answer block; without it, `final_text` reads the answer.
    """

    rewards: RewardSettings = RewardSettings()
    judge: Judge | None = None
    anchor_weight: float = 0.5
    blocks_only: bool = True

    def read(self, turns: Sequence[Turn]) -> str | None:
        """The answer that is scored; None where there is none."""
        return final_answer(turns) if self.blocks_only else final_text(turns)


@dataclasses.dataclass(frozen=True)
class Played:
    """An episode, what it earned, and what was read as its answer."""

    episode: Episode
    rewards: Rewards
    read: str | None


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A question that is not scored.

    `cause`: `missing` (no such file), `unreadable`, `too_long`, or `refused` (by the server that
    samples); `reason` says more in words.
    """

    question: Question
    cause: str
    reason: str


def play_and_score(
    sampler: Sampler,
    environment: Environment,
    questions: Iterable[Question | LeftOut],
    setting: EpisodeSettings,
    scoring: Scoring,
    seed: int,
    samples: int = 1,
    side_by_side: int | None = None,
) -> Iterator[tuple[int, Played | LeftOut]]:
    """Plays every question `samples` times under `setting` and scores the episodes.

    Yields (number, outcome); sample s of question q has the number q * samples + s. With
    `side_by_side`, that many episodes are played at once, questions are taken when there is room
    for them, and outcomes come as they are done. Without it, all are played at once and come in
    order, and a judge is asked about all of them together. A question that is already `LeftOut`
    is passed on.
    """
    agents = (
        _play(environment, question, setting, seed, sample)
        for question in questions
        for sample in range(samples)
    )
    waiting: list[tuple[int, Episode | LeftOut]] = []
    with contextlib.closing(as_done(sampler, agents, side_by_side or sys.maxsize)) as finished:
        for batch in finished:
            waiting += batch
            if side_by_side is not None:
                yield from _score(waiting, scoring)
                waiting = []
    yield from _score(sorted(waiting, key=lambda done: done[0]), scoring)


async def _play(
    environment: Environment,
    question: Question | LeftOut,
    setting: EpisodeSettings,
    seed: int,
    sample: int,
) -> Episode | LeftOut:
    if isinstance(question, LeftOut):
        return question
    if setting.frames:  # a blind episode opens no file
        try:
            environment.features.tokens(question.video)
        except VideoError as error:
            return LeftOut(question, "unreadable", error.reason)
    episode = await play(environment, question, setting, seed_of(seed, question.id, sample))
    if episode.stop is StopReason.UNREADABLE:
        reason = environment.features.unreadable.get(question.video, "it cannot be read any more")
        return LeftOut(question, "unreadable", reason)
    if episode.stop is StopReason.REFUSED:
        return LeftOut(question, "refused", episode.reason)
    return episode


def _score(
    done: Sequence[tuple[int, Episode | LeftOut]], scoring: Scoring
) -> Iterator[tuple[int, Played | LeftOut]]:
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
    """What the figures of a summary are made of (`rollout.evaluation.summary.figures`)."""
    episode, rewards, read = played.episode, played.rewards, played.read
    statuses = [outcome.status for turn in episode.turns for outcome in turn.calls]
    return {
        "video": episode.question.video,
        "kind": str(episode.question.kind),
        "score": rewards.accuracy,
        "read": read,
        "unread": read is not None and not is_read(episode.question, read),
        "compliant": rewards.compliant,
        "calls": executed_calls(episode),
        "turn_count": len(episode.turns),
        "refused_reports": statuses.count(CallStatus.REFUSED),
        "stop": str(episode.stop),
    }


def final_text(turns: Sequence[Turn]) -> str | None:
    """The last turn's answer block, else what follows its thought; None where there is neither.

    Benchmarks are also played by models that were never taught the block. What stands in a thought
    that was never closed, in a call, or in a turn that was cut off is no answer.
    """
    if not turns or turns[-1].truncated:
        return None
    text = turns[-1].text
    if (block := extract_answer(text)) is not None:
        return block
    rest = first_think(text)[1] if "<think>" in text else text
    if rest is None or find_calls(text):
        return None
    return re.sub(TAG_PATTERN, "", rest).strip() or None
