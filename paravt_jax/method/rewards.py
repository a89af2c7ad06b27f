"""What an episode earned: R = R_acc + format_weight * R_fmt + tool_weight * R_tool (REFERENCE 3).

Owns the reward of one episode, in plain Python. It reads whole turns, the pinned `<think>` included, and what really became
of each call (`Turn.calls`), so a `<tool_response>` that the model invents and a `<tool_code>` earn nothing. Refuses
batches and groups: those are `paravt_jax.method.grpo`. Invariant: R_acc and R_tool lie in [0, 1], so does R_fmt while it is capped,
and one turn scores as the published arithmetic does; several turns are scored one by one and averaged, because read as one
text the first turn's closed think would speak for all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from paravt_jax.method.accuracy import accuracy
from paravt_jax.method.judge import Judge, JudgeSettings
from paravt_jax.method.parsing import (
    extract_answer,
    find_calls,
    first_think,
    format_compliant,
    has_substantive_think,
    tags_balanced,
)
from paravt_jax.method.records import CallStatus, Question, Turn


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """The reward's weights; the defaults are the published recipe (REFERENCE 3)."""

    format_weight: float = 1.0
    """Weight of R_fmt in the total."""
    tool_weight: float = 1.0
    """Weight of R_tool in the total; 0 is the table's "without the tool reward"."""
    answer_suffix: bool = True
    """The answer-suffix term: credit a non-empty answer block with 0.5 and the think with 0.2 (True), or both with 0.3 (False)."""
    gamma: float = 0.3
    """The penalty for a think that is never closed and, at single tokens, for the one that broke a block."""
    format_cap: bool = True
    """Cut R_fmt to [0, 1]. Its terms add up to more, so a capped R_fmt stops telling good from better."""
    open_ended: Literal["f1", "exact", "judge"] = "f1"
    """How open-ended answers are scored."""
    judge: JudgeSettings | None = None
    """Which language model is asked where open_ended is `judge`."""

    def __post_init__(self):
        for name in ("format_weight", "tool_weight", "gamma"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"RewardSettings.{name}: {getattr(self, name)} is not a weight; give a finite number of at least 0"
                )
        if self.open_ended not in ("f1", "exact", "judge"):
            raise ValueError(
                f"RewardSettings.open_ended: {self.open_ended!r} is unknown; choose one of f1, exact, judge"
            )
        if (self.open_ended == "judge") != (self.judge is not None):
            remedy = (
                "give the judge's endpoint and model, from Python"
                if self.judge is None
                else "set it to 'judge', or the judge to None"
            )
            raise ValueError(
                f"RewardSettings.open_ended: {self.open_ended!r} with judge {self.judge}; {remedy}"
            )


@dataclasses.dataclass(frozen=True)
class Rewards:
    """What one episode earned. `format` holds the weighted anchor, `anchor` is the plain R_anchor; `compliant` counts in
    f, which is a share of rollouts here (the paper's f is a mean reward).
    `capped`: whether the cap of R_fmt took something away."""

    accuracy: float
    format: float
    anchor: float
    tool: float
    total: float
    compliant: bool
    capped: bool = False


def _closes_think(text: str) -> bool:
    """Whether the first think is substantive and closed."""
    return has_substantive_think(text) and first_think(text)[1] is not None


def _leaves_think_open(text: str) -> bool:
    """Whether the first think is never closed."""
    return "<think>" in text and first_think(text)[1] is None


def _thinks_then_answers(text: str) -> bool:
    """Whether a non-empty answer follows a substantive, closed think."""
    return _closes_think(text) and extract_answer(first_think(text)[1] or "") is not None


def _thinks_then_calls(turn: Turn) -> bool:
    """Whether a readable call follows a substantive, closed think, and none comes before it."""
    text = turn.text
    if not _closes_think(text):
        return False
    opening = text.index("<think>")
    closing = text.index("</think>", opening)
    starts = [
        tag.start
        for (tag, _), outcome in zip(find_calls(text), turn.calls, strict=True)
        if outcome.call is not None
    ]
    return any(start > closing for start in starts) and not any(start < opening for start in starts)


def _has_call(turn: Turn) -> bool:
    """Whether a call of it could be read."""
    return any(outcome.call is not None for outcome in turn.calls)


def _mean(values: Sequence[bool | float]) -> float:
    return sum(values) / len(values) if values else 0.0


def anchor_reward(turns: Sequence[Turn], gamma: float = 0.3) -> float:
    """R_anchor, the mean over turns of: +0.4 a substantive, closed think, +0.3 a whole flow, -gamma a think opened and never closed.

    A whole flow is think -> answer in the last turn and think -> call before it. An episode with a turn cut off by the token
    limit is not paid: its R_anchor is at most 0.
    """

    def one(turn: Turn, last: bool) -> float:
        flows = _thinks_then_answers(turn.text) if last else _thinks_then_calls(turn)
        return 0.4 * _closes_think(turn.text) + 0.3 * flows - gamma * _leaves_think_open(turn.text)

    mean = _mean([one(turn, i == len(turns) - 1) for i, turn in enumerate(turns)])
    return min(mean, 0.0) if any(turn.truncated for turn in turns) else mean


def format_base(turns: Sequence[Turn], answer_suffix: bool = True) -> float:
    """R_fmt without its anchor: 0.2 the share of turns with a substantive think; 0.5 the last turn's answer block; 0.3 the share of
    calling turns that think first; 0.1 balanced tags where the rest is positive. Without answer_suffix the first two are 0.3 and 0.3.
    0 where a turn was cut off.
    """
    if not turns or any(turn.truncated for turn in turns):
        return 0.0
    texts = [turn.text for turn in turns]
    answer = (0.5 if answer_suffix else 0.3) * (extract_answer(texts[-1]) is not None)
    think = (0.2 if answer_suffix else 0.3) * _mean([has_substantive_think(text) for text in texts])
    order = 0.3 * _mean([_thinks_then_calls(turn) for turn in turns if _has_call(turn)])
    base = think + answer + order
    return base + 0.1 * all(map(tags_balanced, texts)) if base > 0 else 0.0


def tool_reward(turns: Sequence[Turn], right: bool) -> float:
    """R_tool in [0, 1]: 0.1 a readable call, 0.3 once one was executed, and 0.5 more where the answer earned anything.

    Counted from the outcomes of calls, never from text; a call in a turn that offers no tools earns nothing.
    """
    outcomes = [
        o
        for turn in turns
        for o in turn.calls
        if o.call is not None and o.status is not CallStatus.NOT_OFFERED
    ]
    if not outcomes:
        return 0.0
    return min((0.3 if any(o.status.executed for o in outcomes) else 0.1) + 0.5 * right, 1.0)


def score_all(
    played: Sequence[tuple[Question, Sequence[Turn]]],
    settings: RewardSettings,
    judge: Judge | None = None,
    anchor_weight: float = 0.5,
    answers: Sequence[str | None] | None = None,
) -> list[Rewards]:
    """What each of several episodes earned; a judge is asked about all of them at once. An episode
    without turns earns 0.

    `anchor_weight` is the weight of R_anchor inside R_fmt (`GRPOSettings.sequence_anchor`); 0.5 is
    the release's. `answers` are the episodes' answers where they are not those of `final_answer`.
    """
    if answers is None:
        answers = [final_answer(turns) for _, turns in played]
    items = [(question, answer) for (question, _), answer in zip(played, answers, strict=True)]
    if settings.judge is None:
        if judge is not None:
            raise ValueError(
                "score_all: a judge is given and RewardSettings.judge names none; set open_ended to 'judge', and the judge"
            )
        right = [
            accuracy(question, answer, "exact" if settings.open_ended == "exact" else "f1")
            for question, answer in items
        ]
    elif judge is None:
        raise ValueError(
            "score_all: judge is missing; RewardSettings.judge names one, make it with RemoteJudge(settings.judge)"
        )
    else:
        right = judge.scores(items)
    return [
        _add_up(turns, earned, settings, anchor_weight)
        for (_, turns), earned in zip(played, right, strict=True)
    ]


def final_answer(turns: Sequence[Turn]) -> str | None:
    """The last turn's answer, unless that turn was cut off."""
    return extract_answer(turns[-1].text) if turns and not turns[-1].truncated else None


def score(
    question: Question,
    turns: Sequence[Turn],
    settings: RewardSettings,
    anchor_weight: float = 0.5,
) -> Rewards:
    """What one episode earned without a judge; arguments as of `score_all`."""
    return score_all([(question, turns)], settings, anchor_weight=anchor_weight)[0]


def _add_up(
    turns: Sequence[Turn], right: float, settings: RewardSettings, anchor_weight: float
) -> Rewards:
    """All terms of an episode whose answer earned `right`."""
    anchor = anchor_reward(turns, settings.gamma)
    whole = format_base(turns, settings.answer_suffix) + anchor_weight * anchor
    form = min(max(whole, 0.0), 1.0) if settings.format_cap else whole
    tool = tool_reward(turns, right > 0)
    total = right + settings.format_weight * form + settings.tool_weight * tool
    return Rewards(right, form, anchor, tool, total, format_compliant(turns), form != whole)
