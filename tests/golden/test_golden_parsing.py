"""tool_parser.json and the calls of eval_parsing.json against our parsing of calls."""

from __future__ import annotations

import json
import re
from typing import Any

from paravt_jax.method.records import Call, CropCall, FailedCall
from tests.golden.conftest import Excuse
from tests.golden.texts import (
    alone,
    floats,
    loads,
    window,
    windows,
)
from tests.turns import read_calls


def crops(calls: list[Call | FailedCall]) -> list[CropCall]:
    return [call for call in calls if isinstance(call, CropCall)]


def read_whole(text: str) -> list[Any] | None:
    """A turn's calls as the release's parser reads them: all of them, or None.

    A call goes from an opening tag to a closing one, or to the end of the text.
    """
    calls = []
    _, opening, rest = text.partition("<tool_call>")
    while opening:
        body, _, rest = rest.partition("</tool_call>")
        calls.append(loads(body))
        _, opening, rest = rest.partition("<tool_call>")
    for call in calls:
        if not isinstance(call, dict) or not call.keys() >= {"name", "arguments"}:
            return None
    return calls or None


def each_alone(record: dict, calls: list[Call | FailedCall]) -> bool:
    return crops(calls) == alone(record["text"])


def never_code(text: str, calls: list[Call | FailedCall]) -> bool:
    """Whether calls in JSON are read, and every block of code is one malformed call."""
    malformed = len(calls) - len(crops(calls))
    return crops(calls) == alone(text) and malformed >= text.count("<tool_code>")


TURNS = {
    # `<tool_code>` is never a call (REFERENCE 2). The release runs it if there is no call in
    # JSON.
    "code": Excuse(
        applies=lambda r: (
            "<tool_code>" in r["text"]
            and r["expected"]["tools_called"]
            and read_whole(r["text"]) is None
        ),
        holds=lambda r, calls: never_code(r["text"], calls),
    ),
    # Each call is read on its own. In the release one malformed call voids the whole turn
    # (REFERENCE 4, 10), and some raise.
    "voided": Excuse(
        applies=lambda r: not r["expected"]["tools_called"] and bool(alone(r["text"])),
        holds=each_alone,
    ),
    # A call without a closing tag is malformed. The release reads it to the end of the text.
    "unclosed": Excuse(
        applies=lambda r: (
            r["expected"]["tools_called"]
            and r["text"].rfind("<tool_call>") > r["text"].rfind("</tool_call>")
        ),
        holds=lambda r, calls: each_alone(r, calls) and isinstance(calls[-1], FailedCall),
    ),
    # Every opening tag begins a call. The release skips one inside a JSON string.
    "tags in a string": Excuse(
        applies=lambda r: (
            r["expected"]["tools_called"]
            and bool(
                re.search(r"<tool_call>((?!</tool_call>).)*<tool_c(all|ode)>", r["text"], re.DOTALL)
            )
        ),
        holds=each_alone,
    ),
    # A call is crop_video with two finite times. The release takes any name and any arguments.
    "no crop": Excuse(
        applies=lambda r: len(windows(decoded(r))) < len(r["expected"]["tool_calls"]),
        holds=lambda r, calls: (
            each_alone(r, calls)
            and len(calls) - len(crops(calls)) >= len(decoded(r)) - len(windows(decoded(r)))
        ),
    ),
}


def decoded(record: dict) -> list[dict]:
    return [
        {"name": call["name"], "arguments": json.loads(call["arguments"])}
        for call in record["expected"]["tool_calls"]
    ]


def test_tool_parser(records, hold):
    hold(
        records("tool_parser"),
        lambda r: read_calls(r["text"]),
        lambda r, calls: crops(calls) == [window(call) for call in decoded(r)],
        TURNS,
        least=0.3,
    )


def values(text: str) -> int:
    """The number of JSON values between tool_call tags."""
    return sum(
        loads(body) is not None
        for body in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    )


RESPONSES = {
    # `<tool_code>` is never a call (REFERENCE 2). The release's evaluation takes one that begins
    # with crop_video(.
    "code": Excuse(
        applies=lambda r: "<tool_code>" in r["input"] and len(r["expected"]) > values(r["input"]),
        holds=lambda r, calls: never_code(r["input"], calls),
    ),
    # A call is crop_video with two finite times: the release's evaluation takes any JSON, and later
    # crashes on some. If a call is interrupted by another, only the first is lost, and line breaks
    # and tabs are allowed in a call's strings: the release's evaluation drops these calls.
    "others": Excuse(
        applies=lambda r: expected_windows(r) != alone(r["input"]),
        holds=lambda r, calls: crops(calls) == alone(r["input"]),
    ),
}


def expected_windows(record: dict) -> list[CropCall | None]:
    return [window(call) for call in floats(record["expected"])]


def test_parse_tool_calls(records, hold):
    hold(
        records("eval_parsing", "parse_tool_calls"),
        lambda r: read_calls(r["input"]),
        lambda r, calls: crops(calls) == expected_windows(r),
        RESPONSES,
        least=0.3,
    )
