"""Builds turns and calls from text, for tests that play no episode."""

from __future__ import annotations

from collections.abc import Sequence

from paravt_jax.method.accuracy import accuracy
from paravt_jax.method.parsing import parse_calls
from paravt_jax.method.records import Call, CallOutcome, CallStatus, FailedCall, Question, Turn
from paravt_jax.method.rewards import Rewards, RewardSettings, combine, final_answer
from paravt_jax.method.tools.crop_video import CropVideo


def read_calls(text: str) -> list[Call | FailedCall]:
    """Parses the calls of a response; crop_video is the only tool."""
    return parse_calls(text, (CropVideo(),))


def turn_of(
    text: str, status: CallStatus = CallStatus.EXECUTED, *, truncated: bool = False
) -> Turn:
    """Returns a turn in which every call that can be parsed has `status`."""
    outcomes = []
    for call in read_calls(text):
        if isinstance(call, FailedCall):
            outcomes.append(CallOutcome(None, call.status, call.reason))
        else:
            outcomes.append(CallOutcome(call, status, ""))
    return Turn(text, tuple(outcomes), truncated)


def score(
    question: Question,
    turns: Sequence[Turn],
    settings: RewardSettings,
    anchor_weight: float = 0.5,
) -> Rewards:
    """Returns the rewards of an episode whose answer is scored by rules."""
    r_acc = accuracy(question, final_answer(turns))
    return combine(turns, r_acc, settings, anchor_weight)
