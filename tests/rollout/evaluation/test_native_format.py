"""Forms in which models write: calls and answers are found, and what is broken is told.

The responses are made up here, in forms that published models use. No model wrote them.
"""

from __future__ import annotations

import json
import time

import pytest

from paravt_jax.method.parsing import extract_answer, find_calls, parse_calls
from paravt_jax.method.records import CropCall, FailedCall
from paravt_jax.method.tools.crop_video import CropVideo
from rollout.evaluation.native_format import NativeFormat

SEGMENT = {"segment": ["start_time", "end_time"]}
ZOOM = NativeFormat(call="<zoom>(.*?)</zoom>", arguments=SEGMENT)
CLIP = NativeFormat(call="<clip>(?P<spans>.*?)</clip>", arguments={"spans": SEGMENT["segment"]})
AGENT = NativeFormat(
    json_answer="result.final",
    json_calls="next.calls",
    name_field="do",
    arguments_field="with",
    tools={"look": "crop_video"},
    arguments={"from": "start_time", "to": "end_time"},
)
LINES = NativeFormat(
    call=r"(?m)^ACTION (?P<name>\w+)\((?P<arguments>.*?)\)$",
    answer=r"(?m)^ANSWER ([^\n]*)$",
    tools={"look": "crop_video"},
)


def agent(final=None, **calls) -> str:
    return json.dumps({"result": {"final": final}, "next": calls})


def look(**arguments) -> dict:
    return {"do": "look", "with": arguments}


TWO = [(1, 2), (3, 4)]
OURS = '{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}'
FENCED = f"<think>{{x}}</think>\n```json\n{agent(calls=[look(start=3, end=4)])}\n```"


@pytest.mark.parametrize(
    ("form", "text", "windows"),
    [
        (ZOOM, '<zoom>{"segment": [4.0, 6.5]}</zoom>', [(4, 6.5)]),
        (ZOOM, '<zoom>{"segment": ["0:04", "0:06"]}</zoom>', [(4, 6)]),
        (ZOOM, '<zoom>{"segment": "00:00:04 to 00:01:06"}</zoom>', [(4, 66)]),
        (ZOOM, '<zoom>{"segment": [[1, 2], [3, 4]]}</zoom>', TWO),
        (ZOOM, '<zoom>{"segment": "00:00:04,500-00:00:06,000"}</zoom>', [(4.5, 6)]),
        (ZOOM, '<zoom>{"segment": "00:00:04,500 --> 00:00:06"}</zoom>', [(4.5, 6)]),
        (ZOOM, '<zoom>{"segment": "<4.0 seconds> - <6.5 s>"}</zoom>', [(4, 6.5)]),
        (ZOOM, '<zoom>{"segment": "from 4s to 6s"}</zoom>', [(4, 6)]),
        (CLIP, "<clip>[4, 6]</clip>", [(4, 6)]),
        (ZOOM, '<zoom>[{"segment": [1, 2]}, {"segment": [3, 4]}]</zoom>', TWO),
        (ZOOM, '<zoom>{"start_time": 1, "end_time": 2}</zoom>', [(1, 2)]),
        (ZOOM, "<zoom>start=1 end=2</zoom> <zoom>start=3, end=4</zoom>", TWO),
        (ZOOM, f"<zoom>{OURS}</zoom>", [(1, 2)]),
        (ZOOM, f"<tool_call>{OURS}</tool_call>", [(1, 2)]),
        (ZOOM, "<zoom> </zoom>", []),
        (CLIP, "<clip>00:00:05-00:00:10, 00:01:00 - 00:01:10</clip>", [(5, 10), (60, 70)]),
        (CLIP, "<clip></clip><answer>B</answer>", []),
        (AGENT, agent(calls=look(**{"from": 1, "to": "0:02"})), [(1, 2)]),
        (AGENT, agent(calls=[look(start=1, end=2), look(start=3, end=4)]), TWO),
        (AGENT, FENCED, [(3, 4)]),
        (AGENT, f"<tool_call>{OURS}</tool_call>", [(1, 2)]),
        (AGENT, OURS, [(1, 2)]),
        (AGENT, agent("B", calls=[look(start=3, end=4)]), []),
        (AGENT, f"{agent(calls=[look(start=3, end=4)])} because {{x}} holds", [(3, 4)]),
        (LINES, "I see.\nACTION look(start=1, end=2)\nACTION look(start=3, end=4)", TWO),
        (LINES, 'ACTION look({"start": 1, "end": 2})', [(1, 2)]),
    ],
)
def test_calls_are_read_with_their_windows(form, text, windows):
    calls = parse_calls(form(text), [CropVideo()])
    assert calls == [CropCall(float(start), float(end)) for start, end in windows]


@pytest.mark.parametrize(
    ("form", "text", "reason"),
    [
        (ZOOM, '<zoom>{"segment": [4</zoom>', "not valid JSON"),
        (ZOOM, "<zoom>the end</zoom>", "not valid JSON"),
        (ZOOM, '<zoom>{"segment": 4}</zoom>', "end_time is missing"),
        (ZOOM, '<zoom>{"segment": "all"}</zoom>', "start_time is missing"),
        (ZOOM, '<zoom>{"segment": "1h2m"}</zoom>', "start_time is missing"),
        (ZOOM, '<zoom>{"segment": "-4 to 6"}</zoom>', "start_time is missing"),
        (ZOOM, '<zoom>{"segment": ["-4", "6"]}</zoom>', "start_time is missing"),
        (ZOOM, '<zoom>{"segment": "4 to 6 min"}</zoom>', "start_time is missing"),
        (ZOOM, "<zoom>[4, 6]</zoom>", "names no tool"),
        (ZOOM, '<zoom>{"name": "search", "arguments": {}}</zoom>', "There is no such tool"),
        (CLIP, "<clip>the end</clip>", "start_time is missing"),
        (AGENT, agent(calls=[{"do": "search", "with": {}}]), "There is no such tool"),
        (AGENT, agent(calls=["look"]), "names no tool"),
        (AGENT, agent(), "names no tool"),
        (AGENT, '{"result": }', "not valid JSON"),
        (LINES, "ACTION search(start=1)", "There is no such tool"),
    ],
)
def test_a_call_that_cannot_be_read_gets_an_error_that_says_why(form, text, reason):
    (call,) = parse_calls(form(text), [CropVideo()])
    assert isinstance(call, FailedCall)
    assert reason in call.reason


def test_a_call_that_cannot_be_read_does_not_hide_others():
    read = AGENT(agent(calls=[look(start=1, end=2), "look", look(**{"from": 3})]))
    first, second, third = parse_calls(read, [CropVideo()])
    assert first == CropCall(1.0, 2.0)
    assert isinstance(second, FailedCall) and isinstance(third, FailedCall)


@pytest.mark.parametrize(
    ("form", "text", "answer"),
    [
        (AGENT, f"<think>x</think>{agent('B')}", "B"),
        (AGENT, agent([3.5, 12]), "[3.5, 12]"),
        (AGENT, agent(0), "0"),
        (AGENT, f"{agent('B')} because {{x}} holds", "B"),
        (AGENT, f"<json>{agent('B')}</json> (see {{1}})", "B"),
        (AGENT, f"{agent()}\n{agent('B')}", "B"),
        (AGENT, f'{agent("B")}\n{agent()} {{"note": 1}}', "B"),
        (AGENT, f'{{"cut": {{x}} {agent("A")} {agent("B")}', "B"),
        (AGENT, '<answer>{"B"}</answer>', '{"B"}'),
        (AGENT, r"<answer>\boxed{B}</answer>", r"\boxed{B}"),
        (LINES, "I see.\nANSWER A\nNo.\nANSWER B", "B"),
        (LINES, "ANSWER B\nANSWER ", "B"),
        (NativeFormat(answer="Final(?: answer: (.))?"), "Final answer: B. Final.", "B"),
        (CLIP, "<think>x</think><clip></clip><answer>B</answer>", "B"),
        (ZOOM, r"<think>x</think><answer>\boxed{B}</answer>", r"\boxed{B}"),
    ],
)
def test_answers_are_read(form, text, answer):
    read = form(text)
    assert extract_answer(read) == answer
    assert not find_calls(read)


def test_a_match_without_an_answer_is_none():
    assert NativeFormat(answer="Final(?: answer: (.))?")("Final.") == "Final."
    assert NativeFormat(answer="(.*)")("") == ""


def test_text_without_an_object_or_a_match_stays():
    for form in (ZOOM, CLIP, AGENT, LINES, NativeFormat()):
        for text in ("", "B", r"It is \boxed{B}.", '{"cut": ', "<think>{x}</think> B"):
            assert form(text) == text


@pytest.mark.parametrize(
    ("arguments", "frames"),
    [
        ({"segment": [4, 6], "fps": 2}, 4),
        ({"segment": [4, 4.1], "fps": 2}, 1),
        ({"segment": [4, 6], "fps": 2, "num_frames": 7}, 7),
        ({"segment": [4, 6]}, None),
        ({"segment": [4, 6], "fps": "fast"}, None),
        ({"segment": [4, 6], "fps": 1e999}, None),
    ],
)
def test_a_rate_of_frames_becomes_their_number(arguments, frames):
    (call,) = parse_calls(ZOOM(f"<zoom>{json.dumps(arguments)}</zoom>"), [CropVideo(16)])
    assert call == CropCall(4.0, float(arguments["segment"][1]), frames)


def test_json_that_is_nested_too_deeply_stays():
    nested = '{"a":' * 100_000 + "1" + "}" * 100_000
    assert AGENT(nested) == nested
    assert ZOOM(f"<zoom>{nested}</zoom>") == f"<zoom>{nested}</zoom>"


@pytest.mark.parametrize("part", ["1", " ", "1 ", ":1", "1s", "(", '{"', "{} "])
def test_a_long_text_that_does_not_match_takes_a_moment(part):
    text = part * 10_000 + "x"
    start = time.process_time()
    for response in (f"<zoom>{text}</zoom>", f"<clip>{text}</clip>", f"{text}}}"):
        for form in (ZOOM, CLIP, AGENT):
            form(response)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"call": "(a)(b)"}, "call: has 2 groups; give one, around what is read, or name all"),
        ({"call": "(?P<x>a)(b)"}, "call: has 2 groups"),
        ({"answer": "a"}, "answer: has 0 groups; give one, around what is read"),
        ({"json_calls": "next..calls"}, "json_calls: 'next..calls' has an empty name"),
    ],
)
def test_a_form_that_cannot_be_read_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        NativeFormat(**fields)
