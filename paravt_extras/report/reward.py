"""What the reward of a run pays, in words."""

from __future__ import annotations

import dataclasses

from paravt_jax.method.rewards import RewardSettings, frugal_reward


def describe(settings: RewardSettings) -> str:
    """What a reward pays, in a few words for the report."""
    answers = "right answers"
    if settings.tool_turn_cost:
        answers += f" (worth {100 * settings.tool_turn_cost:.3g} % less per turn with tools)"
    terms = [answers]
    if settings.format_weight:
        terms.append("format")
    # The order term is part of the format reward, and may be earned by calls only.
    order_pays_calls = settings.format_weight > 0 and not settings.order_without_calls
    if settings.tool_weight or order_pays_calls:
        terms.append("calls")
    *others, last = terms
    paid = f"{', '.join(others)} and {last}" if others else last
    # The names cover any cap and any scorer of open-ended answers.
    compared = dataclasses.replace(settings, format_cap=False, open_ended="f1", judge=None)
    name = "a reward"
    if compared == RewardSettings(format_cap=False):
        name = "the published reward"
    elif compared == frugal_reward():
        name = "the frugal reward"
    return f"{name}, for {paid}"
