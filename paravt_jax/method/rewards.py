"""The reward of an episode.

    R = R_acc * (1 - tool_turn_cost * tool turns) + format_weight * R_fmt + tool_weight * R_tool

    R_acc   correctness of the answer, in [0, 1] (`paravt_jax.method.accuracy`)
    R_fmt   format_base + anchor_weight * R_anchor, clipped to [0, 1] by default
    R_tool  executed calls, and a right answer after them, in [0, 1]

Two choices of settings have names. `RewardSettings()` is the published reward. It also pays for
calls: by R_tool, and by the order term of R_fmt, which only episodes with calls can earn.
`frugal_reward` pays right answers and format alone, and a right answer is worth a little less for
each turn in which tools ran. Calls side by side are one such turn, so looking at several moments at
once costs no more than looking at one.

Whole turns are scored, including the pinned `<think>`. Each turn is scored separately, and the
scores are averaged: in one joined text, the closed think of the first turn would count for all.
Tool rewards come from the outcomes of calls (`Turn.calls`), so a `<tool_response>` that the model
invents earns nothing. An episode of one turn scores as in the published code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from paravt_jax.checks import require_at_least, require_share
from paravt_jax.method.judge import Judge, JudgeSettings
from paravt_jax.method.parsing import (
    extract_answer,
    find_calls,
    first_think,
    format_compliant,
    has_substantive_think,
    tags_balanced,
)
from paravt_jax.method.records import CallStatus, Episode, Question, Turn


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """Weights of the reward; the defaults are the published recipe."""

    format_weight: float = 1.0
    """Weight of R_fmt in the total."""
    tool_weight: float = 1.0
    """Weight of R_tool in the total; 0 is the paper's row "without the tool reward"."""
    tool_turn_cost: float = 0.0
    """Share of R_acc lost per turn with tools; above 0, R_fmt's order term needs no calls."""
    answer_suffix: bool = True
    """Give 0.5 for a non-empty answer block and 0.2 for a think, instead of 0.3 for each."""
    # Under the anchors `credit` and `likelihood`, each token that breaks a block is penalised too.
    gamma: float = 0.3
    """Penalty for a think that is never closed, and under some anchors for any broken block."""
    # The terms of R_fmt can exceed 1 together. A capped R_fmt no longer tells good from better.
    format_cap: bool = True
    """Clip R_fmt to [0, 1]."""
    judge: JudgeSettings | None = None
    """The language model that scores open-ended answers; None: by word F1."""

    def __post_init__(self):
        section = "rl.rewards"
        require_at_least(section, self, 0, "format_weight", "tool_weight", "gamma")
        require_share(section, self, "tool_turn_cost")


def frugal_reward() -> RewardSettings:
    """Return a reward for right answers and format that pays nothing for calls as such."""
    return RewardSettings(tool_weight=0.0, tool_turn_cost=0.2, format_cap=False)


@dataclasses.dataclass(frozen=True)
class Rewards:
    """The rewards of one episode."""

    accuracy: float
    """R_acc."""
    format: float
    """R_fmt, including the weighted anchor."""
    anchor: float
    """R_anchor, unweighted."""
    tool: float
    """R_tool."""
    total: float
    """The weighted sum R."""
    compliant: bool
    """Whether all turns keep the format. The metric `compliance` is the share of such rollouts; the
    paper's f is the mean of `published_format` instead."""
    capped: bool = False
    """Whether the cap changed R_fmt."""
    uncounted: tuple[str, ...] = ()
    """Names of the rewards whose weight in R is 0."""


def _closes_think(text: str) -> bool:
    """Return whether the first think is substantive and closed."""
    return has_substantive_think(text) and first_think(text)[1] is not None


def _leaves_think_open(text: str) -> bool:
    """Return whether the first think is never closed."""
    return "<think>" in text and first_think(text)[1] is None


def _thinks_then_answers(text: str) -> bool:
    """Return whether a non-empty answer follows a substantive, closed think."""
    return _closes_think(text) and extract_answer(first_think(text)[1] or "") is not None


def _thinks_then_calls(turn: Turn) -> bool:
    """Return whether a readable call follows a substantive, closed think, and none comes before
    it."""
    text = turn.text
    if not _closes_think(text):
        return False
    # `turn.calls` has an outcome for every call in the text, in the order of `find_calls`.
    opening = text.index("<think>")
    closing = text.index("</think>", opening)
    calls = zip(find_calls(text), turn.calls, strict=True)
    starts = [tag.start for (tag, _), outcome in calls if outcome.call is not None]
    call_before = any(start < opening for start in starts)
    call_after = any(start > closing for start in starts)
    return call_after and not call_before


def _has_call(turn: Turn) -> bool:
    """Return whether at least one of the turn's calls is readable."""
    return any(outcome.call is not None for outcome in turn.calls)


def _mean(values: Sequence[bool | float]) -> float:
    return sum(values) / len(values) if values else 0.0


def anchor_reward(turns: Sequence[Turn], gamma: float = 0.3) -> float:
    """Return R_anchor, the mean over turns of three terms.

        +0.4    a substantive, closed think
        +0.3    the whole flow: think then answer in the last turn, think then call before it
        -gamma  a think that is opened and never closed

    If a turn was truncated, R_anchor is at most 0.
    """
    flows = [_thinks_then_calls(turn) for turn in turns[:-1]]
    flows += [_thinks_then_answers(turn.text) for turn in turns[-1:]]
    scores = [
        0.4 * _closes_think(turn.text) + 0.3 * flow - gamma * _leaves_think_open(turn.text)
        for turn, flow in zip(turns, flows, strict=True)
    ]
    mean = _mean(scores)
    return min(mean, 0.0) if any(turn.truncated for turn in turns) else mean


def format_base(
    turns: Sequence[Turn], answer_suffix: bool = True, order_without_calls: bool = False
) -> float:
    """Return R_fmt without its anchor.

        0.2  times the share of turns with a substantive think (0.3 without `answer_suffix`)
        0.5  an answer block in the last turn (0.3 without `answer_suffix`)
        0.3  the order term: times the share of calling turns that think first
        0.1  balanced tags, if any of the above is earned

    0 if a turn was truncated.

    In the release, only episodes with calls can earn the order term, so it also pays for calls.
    With `order_without_calls`, an episode without calls earns it if it thinks and then answers.
    """
    if not turns or any(turn.truncated for turn in turns):
        return 0.0
    texts = [turn.text for turn in turns]
    answer_weight = 0.5 if answer_suffix else 0.3
    think_weight = 0.2 if answer_suffix else 0.3
    answer = answer_weight * (extract_answer(texts[-1]) is not None)
    think = think_weight * _mean([has_substantive_think(text) for text in texts])
    in_order = [_thinks_then_calls(turn) for turn in turns if _has_call(turn)]
    if order_without_calls and not in_order:
        in_order = [_thinks_then_answers(texts[-1])]
    base = think + answer + 0.3 * _mean(in_order)
    # A text without any tags is balanced too, but must not earn a reward for that.
    if base > 0:
        base += 0.1 * all(tags_balanced(text) for text in texts)
    return base


def published_format(turns: Sequence[Turn]) -> float:
    """Return R_fmt as published, in [0, 1], whatever a run's own settings are: it compares runs.

    The answer-suffix terms, plus half of R_anchor, cut to [0, 1].
    """
    published = RewardSettings()
    reward = format_base(turns) + 0.5 * anchor_reward(turns, published.gamma)
    return min(max(reward, 0.0), 1.0)


def tool_reward(turns: Sequence[Turn], right: bool) -> float:
    """Return R_tool: 0.1 for a readable call, 0.3 if one was executed, plus 0.5 for a right answer.

    Calls in a turn without tools do not count.

    Args:
        turns: The main agent's turns.
        right: Whether the answer earned any R_acc.
    """
    # Read the outcomes, not the text: a model can write calls and tool responses that never ran.
    outcomes = [outcome for turn in turns for outcome in turn.calls]
    outcomes = [
        outcome
        for outcome in outcomes
        if outcome.call is not None and outcome.status is not CallStatus.NOT_OFFERED
    ]
    if not outcomes:
        return 0.0
    called = 0.3 if any(outcome.status.executed for outcome in outcomes) else 0.1
    return min(called + 0.5 * right, 1.0)


def final_answer(turns: Sequence[Turn]) -> str | None:
    """Return the answer in the last turn; None if there is none or that turn was truncated."""
    if not turns or turns[-1].truncated:
        return None
    return extract_answer(turns[-1].text)


def combine(
    turns: Sequence[Turn], r_acc: float, settings: RewardSettings, anchor_weight: float = 0.5
) -> Rewards:
    """Return all rewards of an episode whose answer earned `r_acc`.

    Args:
        turns: The main agent's turns. An episode without turns earns 0.
        r_acc: R_acc, from a `Judge`.
        settings: Weights of the terms.
        anchor_weight: Weight of R_anchor inside R_fmt (`GRPOSettings.sequence_anchor`); 0.5 in the
            release.
    """
    r_anchor = anchor_reward(turns, settings.gamma)
    base = format_base(turns, settings.answer_suffix, settings.tool_turn_cost > 0)
    uncapped = base + anchor_weight * r_anchor
    r_fmt = min(max(uncapped, 0.0), 1.0) if settings.format_cap else uncapped
    r_tool = tool_reward(turns, r_acc > 0)
    tool_turns = sum(turn.executed_calls > 0 for turn in turns)
    discount = max(0.0, 1.0 - settings.tool_turn_cost * tool_turns)
    total = r_acc * discount + settings.format_weight * r_fmt + settings.tool_weight * r_tool
    weights = {
        "format": settings.format_weight,
        "anchor": settings.format_weight * anchor_weight,
        "tool": settings.tool_weight,
    }
    return Rewards(
        accuracy=r_acc,
        format=r_fmt,
        anchor=r_anchor,
        tool=r_tool,
        total=total,
        compliant=format_compliant(turns),
        capped=r_fmt != uncapped,
        uncounted=tuple(name for name, weight in weights.items() if not weight),
    )


def score_all(
    played: Sequence[tuple[Question, Sequence[Turn]]],
    settings: RewardSettings,
    judge: Judge,
    anchor_weight: float = 0.5,
    answers: Sequence[str | None] | None = None,
) -> list[Rewards]:
    """Score several episodes. The judge is asked about all of them at once.

    Args:
        played: Question and turns of each episode.
        settings: Weights of the terms.
        judge: Scores answers: by rules (`paravt_jax.method.accuracy.Rules`), or the client for
            `settings.judge`.
        anchor_weight: See `combine`.
        answers: The answer of each episode; by default the result of `final_answer`.
    """
    if answers is None:
        answers = [final_answer(turns) for _, turns in played]
    items = [(question, answer) for (question, _), answer in zip(played, answers, strict=True)]
    return [
        combine(turns, r_acc, settings, anchor_weight)
        for (_, turns), r_acc in zip(played, judge.scores(items), strict=True)
    ]


def tool_gap(values: Sequence[float], episodes: Sequence[Episode]) -> float | None:
    """Return the mean value of the episodes that call a tool minus that of those that do not.

    Only executed calls count. The gap is None if one of the two sides has no episode.

    Args:
        values: A reward or score of each episode.
        episodes: The episodes.
    """
    scored = list(zip(values, episodes, strict=True))
    with_calls = [value for value, episode in scored if episode.executed_calls]
    without = [value for value, episode in scored if not episode.executed_calls]
    if not with_calls or not without:
        return None
    return float(np.mean(with_calls) - np.mean(without))
