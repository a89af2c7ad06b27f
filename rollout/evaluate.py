"""Playing and scoring questions under one setting, through the same episode code as training.

Owns seeds of evaluation and the summary of a set of episodes. Invariant: the numbers of a row are those of its episodes, and
the same seed, questions and weights give the same row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from paravt_jax.method.judge import Judge
from paravt_jax.method.records import Episode, Question, StopReason
from paravt_jax.method.rewards import Rewards, RewardSettings, score_all
from rollout.agent.episode import Dispatch, Scene, Setting, play
from rollout.engine.requests import Sampler, run


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
        self.settings()  # refuses a K or a temperature that no episode can be played with

    def settings(self) -> tuple[Setting, ...]:
        return tuple(
            Setting(k, t, d) for k in self.frames for d in self.dispatch for t in self.temperatures
        )


@dataclasses.dataclass(frozen=True)
class Row:
    """Means over n episodes of one setting.

    accuracy: R_acc, right or wrong, or the IoU of grounding. format: the share of rollouts whose
    every turn parses and that end in an answer block (the paper's f is a mean reward instead).
    calls: executed calls per rollout, kappa. turns: those of the main agent.
    """

    k: int
    dispatch: Dispatch
    temperature: float
    accuracy: float
    format: float
    calls: float
    turns: float
    n: int


def seed_of(*parts: int | str) -> int:
    """A 32-bit seed from what names a sample: run, step, question, rollout."""
    numbers = [
        part if isinstance(part, int) else int.from_bytes(part.encode(), "little") for part in parts
    ]
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def summarise(setting: Setting, scored: Sequence[tuple[Episode, Rewards]]) -> Row:
    """The row of a set of episodes. ValueError where there are none."""
    if not scored:
        raise ValueError(
            "evaluation.questions: not one question has a readable video; check the data root"
        )
    episodes, rewards = zip(*scored, strict=True)
    return Row(
        k=setting.frames,
        dispatch=setting.dispatch,
        temperature=setting.temperature,
        accuracy=float(np.mean([r.accuracy for r in rewards])),
        format=float(np.mean([r.compliant for r in rewards])),
        calls=float(np.mean([executed_calls(e) for e in episodes])),
        turns=float(np.mean([len(e.turns) for e in episodes])),
        n=len(episodes),
    )


def executed_calls(episode: Episode) -> int:
    """Tool calls of an episode that were carried out."""
    return sum(outcome.status.executed for turn in episode.turns for outcome in turn.calls)


def play_and_score(
    sampler: Sampler,
    scene: Scene,
    questions: Sequence[Question],
    setting: Setting,
    rewards: RewardSettings,
    seed: int,
    samples: int = 1,
    progress: Callable[[int, int], None] | None = None,
    judge: Judge | None = None,
    anchor_weight: float = 0.5,
) -> list[tuple[Episode, Rewards]]:
    """Play every question `samples` times under `setting`; those whose video cannot be read, or
    that a server refuses, are left out. `anchor_weight` as of `score_all`.

    An episode depends on its question and the seed, not on what else is played: several processes can share the questions.
    """
    agents = [
        play(scene, q, setting, seed_of(seed, q.id, n)) for q in questions for n in range(samples)
    ]
    lost = (StopReason.UNREADABLE, StopReason.REFUSED)
    episodes = [episode for episode in run(sampler, agents, progress) if episode.stop not in lost]
    earned = score_all([(e.question, e.turns) for e in episodes], rewards, judge, anchor_weight)
    return list(zip(episodes, earned, strict=True))


if __name__ == "__main__":
    # The command's own modules stand on this one, so they are known only once it is whole.
    from rollout.evaluation.command import main

    raise SystemExit(main())
