"""Scores whole episodes: R_acc by rules or by a judge, and the rewards that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paravt_jax.method.accuracy import accuracy
from paravt_jax.method.judge import Judge
from paravt_jax.method.records import Question, Turn
from paravt_jax.method.rewards import Rewards, RewardSettings, combine, final_answer


class Rules:
    """Scores answers by rules (`paravt_jax.method.accuracy`); a `Judge` without a model.

    Args:
        open_ended: How open-ended answers are scored: word F1, or exact match.
    """

    def __init__(self, open_ended: Literal["f1", "exact"] = "f1"):
        self._open_ended: Literal["f1", "exact"] = open_ended

    def scores(self, items: Sequence[tuple[Question, str | None]]) -> list[float]:
        """Return R_acc of each answer, in [0, 1]; 0 for None."""
        return [accuracy(question, answer, self._open_ended) for question, answer in items]

    def metrics(self) -> dict[str, float]:
        """Return nothing: rules count nothing."""
        return {}


def score_all(
    played: Sequence[tuple[Question, Sequence[Turn]]],
    settings: RewardSettings,
    judge: Judge | None = None,
    anchor_weight: float = 0.5,
    answers: Sequence[str | None] | None = None,
) -> list[Rewards]:
    """Score several episodes. A judge is asked about all of them at once.

    Args:
        played: Question and turns of each episode. An episode without turns earns 0.
        settings: Weights of the terms.
        judge: Scores answers: the client for `settings.judge`; None: rules.
        anchor_weight: Weight of R_anchor inside R_fmt (`GRPOSettings.sequence_anchor`); 0.5 in the
            release.
        answers: The answer of each episode; by default the result of `final_answer`.

    Raises:
        ValueError: `settings.judge` has no client.
    """
    if answers is None:
        answers = [final_answer(turns) for _, turns in played]
    items = [(question, answer) for (question, _), answer in zip(played, answers, strict=True)]
    if settings.judge is not None and judge is None:
        raise ValueError(
            "score_all: judge is missing, but RewardSettings.judge is set; "
            "make it with RemoteJudge(settings.judge)"
        )
    return [
        combine(turns, r_acc, settings, anchor_weight)
        for (_, turns), r_acc in zip(played, (judge or Rules()).scores(items), strict=True)
    ]


def score(
    question: Question,
    turns: Sequence[Turn],
    settings: RewardSettings,
    anchor_weight: float = 0.5,
) -> Rewards:
    """Score one episode without a judge. The arguments are those of `score_all`."""
    return score_all([(question, turns)], settings, anchor_weight=anchor_weight)[0]
