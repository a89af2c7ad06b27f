"""tool_parser.json and the calls of eval_parsing.json against our parsing.

Each table has a table of excuses beside its test; what is true instead is read from the record by a reader of the test's own.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from paravt_jax.method.records import Call, CropCall, FailedCall
from paravt_jax.method.tools.crop_video import read_seconds
from tests.golden.conftest import Excuse, check_examples
from tests.turns import read_calls

GOOD = '{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}'
OTHER = '{"name": "zoom", "arguments": {"start_time": 1, "end_time": 2}}'


def crops(calls: list[Call | FailedCall]) -> list[CropCall]:
    return [call for call in calls if isinstance(call, CropCall)]


def window(call: Any) -> CropCall | None:
    """The window that a call's JSON asks for; None where it is no crop_video with two finite times."""
    arguments = call.get("arguments") if isinstance(call, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return None
    if (
        not isinstance(arguments, dict)
        or not isinstance(call, dict)
        or call.get("name") != "crop_video"
    ):
        return None
    start, end = (read_seconds(arguments.get(field)) for field in ("start_time", "end_time"))
    return (
        CropCall(start, end)
        if start is not None and end is not None and math.isfinite(start) and math.isfinite(end)
        else None
    )


def windows(calls: list[Any]) -> list[CropCall]:
    return [w for w in map(window, calls) if w is not None]


def loads(body: str, strict: bool = True) -> Any:
    """A JSON text's value; None where it has none."""
    try:
        return json.loads(body, strict=strict)
    except (ValueError, RecursionError):
        return None


def alone(text: str, strict: bool = False) -> list[CropCall]:
    """The windows of a text's `<tool_call>` blocks, each read on its own: from an opening tag to its closing one, none between."""
    blocks = re.findall(
        r"<tool_call>((?:(?!<tool_call>|<tool_code>).)*?)</tool_call>", text, re.DOTALL
    )
    return windows([loads(block, strict) for block in blocks])


def read_whole(text: str) -> list[Any] | None:
    """A turn's calls as the release's parser takes them, all or nothing: from each opening tag to a closing one, or to the end."""
    calls, (_, opening, rest) = [], text.partition("<tool_call>")
    while opening:
        body, _, rest = rest.partition("</tool_call>")
        calls.append(loads(body))
        _, opening, rest = rest.partition("<tool_call>")
    return (
        calls
        if calls
        and all(isinstance(call, dict) and call.keys() >= {"name", "arguments"} for call in calls)
        else None
    )


def each_alone(record: dict, calls: list[Call | FailedCall]) -> bool:
    return crops(calls) == alone(record["text"])


def never_code(text: str, calls: list[Call | FailedCall]) -> bool:
    """Code is never a call: each block of it is one malformed call, and what stands in JSON is read."""
    return crops(calls) == alone(text) and len(calls) - len(crops(calls)) >= text.count(
        "<tool_code>"
    )


def turn(text: str, *called: dict) -> dict:
    """A record of tool_parser.json."""
    calls = [{"name": call["name"], "arguments": json.dumps(call["arguments"])} for call in called]
    return {
        "id": "example",
        "text": text,
        "error": None,
        "expected": {"tools_called": bool(calls), "tool_calls": calls},
    }


CALL, CODE = json.loads(GOOD), "<tool_code>crop_video(start_time=1, end_time=2)</tool_code>"
PLAIN = turn(f"<tool_call>{GOOD}</tool_call>", CALL)
TWO = [CropCall(1, 2), CropCall(1, 2)]

TURNS = {
    "raises": Excuse(
        "a text that makes the release raise is read here as any other",
        lambda r: r["error"] is not None,
        each_alone,
        {
            "id": "example",
            "text": "<tool_call>" + "[" * 10**5 + "</tool_call>",
            "error": "RecursionError",
            "expected": None,
        },
        PLAIN,
        [CropCall(1, 2)],
    ),
    "code": Excuse(
        "`<tool_code>` is never a call (REFERENCE 2); the release runs it where it finds no call in JSON",
        lambda r: (
            "<tool_code>" in r["text"]
            and r["expected"]["tools_called"]
            and read_whole(r["text"]) is None
        ),
        lambda r, calls: never_code(r["text"], calls),
        turn(CODE, CALL),
        turn(f"{CODE}<tool_call>{GOOD}</tool_call>", CALL),
        [CropCall(1, 2)],
    ),
    "voided": Excuse(
        "one malformed call voids the whole turn in the release (REFERENCE 4, 10); here each is read on its own",
        lambda r: not r["expected"]["tools_called"] and bool(alone(r["text"])),
        lambda r, calls: each_alone(r, calls) and bool(crops(calls)),
        turn(f"<tool_call>{GOOD}</tool_call><tool_call>{{bad}}</tool_call>"),
        turn("<tool_call>{bad}</tool_call>"),
        [],
    ),
    "unclosed": Excuse(
        "a call that nothing closes is malformed; the release takes the rest of the text for it",
        lambda r: (
            r["expected"]["tools_called"]
            and r["text"].rfind("<tool_call>") > r["text"].rfind("</tool_call>")
        ),
        lambda r, calls: each_alone(r, calls) and isinstance(calls[-1], FailedCall),
        turn(f"<tool_call>{GOOD}</tool_call><tool_call>{GOOD}", CALL, CALL),
        PLAIN,
        TWO,
    ),
    "tags in a string": Excuse(
        "an opening tag begins a call wherever it stands; the release reads over it where it stands in a string of the JSON",
        lambda r: (
            r["expected"]["tools_called"]
            and bool(
                re.search(r"<tool_call>((?!</tool_call>).)*<tool_c(all|ode)>", r["text"], re.DOTALL)
            )
        ),
        each_alone,
        turn(
            '<tool_call>{"name": "a", "arguments": {"s": "<tool_call>"}}</tool_call>',
            {"name": "a", "arguments": {"s": "<tool_call>"}},
        ),
        PLAIN,
        [CropCall(1, 2)],
    ),
    "no crop": Excuse(
        "a call is crop_video with two finite times; the release takes any name and any arguments",
        lambda r: len(windows(decoded(r))) < len(r["expected"]["tool_calls"]),
        lambda r, calls: (
            each_alone(r, calls)
            and len(calls) - len(crops(calls)) >= len(decoded(r)) - len(windows(decoded(r)))
        ),
        turn(f"<tool_call>{OTHER}</tool_call>", json.loads(OTHER)),
        PLAIN,
        [CropCall(1, 2)],
    ),
}


def decoded(record: dict) -> list[dict]:
    return [
        {"name": call["name"], "arguments": json.loads(call["arguments"])}
        for call in record["expected"]["tool_calls"]
    ]


def read_turn(record: dict) -> list[Call | FailedCall]:
    return read_calls(record["text"])


def test_tool_parser(records, hold):
    hold(
        records("tool_parser"),
        read_turn,
        lambda r, calls: crops(calls) == [window(call) for call in decoded(r)],
        TURNS,
        least=0.3,
    )


def test_excuses_of_turns():
    check_examples(read_turn, TURNS)


def response(text: Any, expected: Any) -> dict:
    """A record of eval_parsing.json."""
    return {"id": "example", "input": text, "expected": expected, "error": None}


def floats(value: Any) -> Any:
    """A JSON value with the table's spelling of non-finite numbers undone."""
    if isinstance(value, dict):
        return (
            float(value["__float__"])
            if value.keys() == {"__float__"}
            else {k: floats(v) for k, v in value.items()}
        )
    return [floats(v) for v in value] if isinstance(value, list) else value


def values(text: str) -> int:
    """How many JSON values stand between tool_call tags."""
    return sum(
        loads(body) is not None
        for body in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    )


def alone_here(record: dict, calls: list[Call | FailedCall]) -> bool:
    return crops(calls) == alone(record["input"])


ONE = response(f"<tool_call>{GOOD}</tool_call>", [CALL])

RESPONSES = {
    "code": Excuse(
        "`<tool_code>` is never a call (REFERENCE 2); the release's evaluation takes one that begins with crop_video(",
        lambda r: "<tool_code>" in r["input"] and len(r["expected"]) > values(r["input"]),
        lambda r, calls: never_code(r["input"], calls),
        response(CODE, [CALL]),
        response("<tool_code>print(crop_video(start_time=1, end_time=2))</tool_code>", []),
        [CropCall(1, 2)],
    ),
    "reopened": Excuse(
        "a call that another one interrupts is lost alone; the release's evaluation loses both",
        lambda r: (
            bool(
                re.search(
                    r"<tool_call>((?!</tool_call>).)*<tool_c(all|ode)>", r["input"], re.DOTALL
                )
            )
            and alone(r["input"], strict=True) != windows(floats(r["expected"]))
        ),
        alone_here,
        response(f"<tool_call>{GOOD}<tool_call>{GOOD}</tool_call>", []),
        ONE,
        TWO,
    ),
    "line breaks": Excuse(
        "line breaks and tabs may stand in a string of a call; the release's evaluation drops the call",
        lambda r: alone(r["input"], strict=True) != alone(r["input"]),
        alone_here,
        response('<tool_call>{"' + "\n" + '": 0, ' + GOOD[1:] + "</tool_call>", []),
        ONE,
        [],
    ),
    "no crop": Excuse(
        "a call is crop_video with two finite times; the release's evaluation takes any JSON, and some of it crashes it later",
        lambda r: len(windows(floats(r["expected"]))) < len(r["expected"]),
        alone_here,
        response(
            f"<tool_call>[1, 2]</tool_call><tool_call>{OTHER}</tool_call>",
            [[1, 2], json.loads(OTHER)],
        ),
        ONE,
        [CropCall(1, 2)],
    ),
}


def read_response(record: dict) -> list[Call | FailedCall]:
    return read_calls(record["input"])


def test_parse_tool_calls(records, hold):
    table = records("eval_parsing", "parse_tool_calls")
    hold(
        table,
        read_response,
        lambda r, calls: crops(calls) == [window(call) for call in floats(r["expected"])],
        RESPONSES,
        least=0.3,
    )


ZOOMS = {
    "another tool": Excuse(
        "`<video_zoom>` is the syntax of another model's tool and no call here",
        lambda r: bool(r["expected"]) and "<video_zoom>" in r["input"],
        alone_here,
        response(
            "<video_zoom>start=1 end=2</video_zoom>",
            [{"name": "crop_video", "arguments": {"start": 1.0, "end": 2.0}}],
        ),
        response("<video_zoom></video_zoom>", []),
        [CropCall(1, 2)],
    )
}


def test_parse_video_zoom_calls(records, hold):
    """Nearly every record is another tool's call: what agrees is that broken ones are none either."""
    table = records("eval_parsing", "parse_video_zoom_calls")
    hold(
        table,
        read_response,
        lambda r, calls: crops(calls) == alone(r["input"]) and not r["expected"],
        ZOOMS,
        least=0,
    )


def test_excuses_of_responses():
    check_examples(read_response, RESPONSES)
    check_examples(read_response, ZOOMS)
