"""Turns and calls from text alone, for tests that play no episode."""

from __future__ import annotations

from paravt_jax.method.parsing import parse_calls
from paravt_jax.method.records import Call, CallOutcome, CallStatus, FailedCall, Turn
from paravt_jax.method.tools.crop_video import CropVideo


def read_calls(text: str) -> list[Call | FailedCall]:
    """The calls of a response where only crop_video is offered."""
    return parse_calls(text, (CropVideo(),))


def turn_of(
    text: str, status: CallStatus = CallStatus.EXECUTED, *, truncated: bool = False
) -> Turn:
    """A turn whose readable calls have all become `status`."""
    outcomes = tuple(
        CallOutcome(None, call.status, call.reason)
        if isinstance(call, FailedCall)
        else CallOutcome(call, status, "")
        for call in read_calls(text)
    )
    return Turn(text, outcomes, truncated)
