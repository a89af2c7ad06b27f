"""Reading calls, answers and the format from any text a model may emit."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paravt_jax.method.parsing import (
    BLOCKS,
    extract_answer,
    format_compliant,
    has_substantive_think,
    tags_balanced,
    turn_is_well_formed,
)
from paravt_jax.method.records import CallStatus, CropCall, FailedCall, Turn
from paravt_jax.method.tools.crop_video import resolve_window
from paravt_jax.method.tools.tool import Look
from tests.turns import read_calls, turn_of

GOOD = (
    '{"name": "crop_video", "arguments": {"video_path": "v.mp4", "start_time": 3, "end_time": 9.5}}'
)
THINK = "<think>\nthe overview misses it</think>\n"


def call(body: str = GOOD) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def times(start: str, end: str) -> str:
    return call(
        f'{{"name": "crop_video", "arguments": {{"start_time": {start}, "end_time": {end}}}}}'
    )


@pytest.mark.parametrize(
    "start, end, seconds",
    [
        ("16", "24.5", (16, 24.5)),
        ('"16"', '"24.5"', (16, 24.5)),
        ('"00:16"', '"01:04"', (16, 64)),
        ('"1:00:05"', '"1:00:10.5"', (3605, 3610.5)),
        ('"16s"', '"24.5 seconds"', (16, 24.5)),
        ('" 16 sec "', '"20 S"', (16, 20)),
        ("-4", '"-2"', (-4, -2)),
        ("1e1", "2E1", (10, 20)),
    ],
)
def test_times_in_common_forms_are_read(start, end, seconds):
    assert read_calls(times(start, end)) == [CropCall(*seconds)]


@pytest.mark.parametrize(
    "start",
    [
        "true",
        "null",
        '"soon"',
        '""',
        '"00:99"',
        "[1]",
        '"NaN"',
        '"inf"',
        '"1_0"',
        '"1.2.3"',
        "{}",
        '"１６ o’clock"',
    ],
)
def test_other_values_are_malformed(start):
    (got,) = read_calls(times(start, "20"))
    assert isinstance(got, FailedCall)
    assert got.status is CallStatus.MALFORMED
    assert "start_time" in got.reason


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_numbers_that_are_not_finite_are_bad_windows(value):
    (got,) = read_calls(times("1", value))
    assert isinstance(got, FailedCall)
    assert got.status is CallStatus.BAD_WINDOW


def test_a_malformed_call_does_not_void_the_others():
    text = call() + call("oops") + call() + "<tool_call>" + GOOD
    assert [isinstance(c, CropCall) for c in read_calls(text)] == [True, False, True, False]


def test_an_unclosed_call_does_not_swallow_the_next():
    calls = read_calls("<tool_call>" + GOOD + call())
    assert isinstance(calls[0], FailedCall)
    assert calls[1] == CropCall(3, 9.5)


def test_code_is_reported_and_never_run():
    (got,) = read_calls("<tool_code>print(crop_video(start_time=1, end_time=2))</tool_code>")
    assert isinstance(got, FailedCall)
    assert got.status is CallStatus.MALFORMED
    assert "tool_call" in got.reason
    assert not isinstance(read_calls("<tool_code>" + GOOD + "</tool_code>" + call())[0], CropCall)


def test_reasons_contain_no_tags():
    """A reason becomes a tool response: a tag in it would be tokenised as one."""
    bodies = ("oops", "[]", '{"name": "crop_video"}', '{"name": "x"}', "[" * 99_999)
    text = "<tool_code>x" + "".join(map(call, bodies)) + "<tool_call>"
    calls = read_calls(text)
    assert len(calls) == 7
    for got in calls:
        assert isinstance(got, FailedCall)
        assert got.reason.endswith(".")
        assert "<" not in got.reason


def test_other_tools_and_shapes():
    (other,) = read_calls(
        call('{"name": "video_zoom", "arguments": {"start_time": 1, "end_time": 2}}')
    )
    assert isinstance(other, FailedCall)
    assert other.status is CallStatus.UNKNOWN_TOOL
    as_text = json.dumps(
        {"name": "crop_video", "arguments": json.dumps({"start_time": 1, "end_time": 2})}
    )
    assert read_calls(call(as_text)) == [CropCall(1, 2)]
    for body in (
        "",
        "null",
        "[]",
        "3",
        '{"name": null}',
        '{"name": ["x"]}',
        '{"name": "crop_video"}',
        "{'name': 'crop_video'}",
    ):
        assert isinstance(read_calls(call(body))[0], FailedCall)


@pytest.mark.parametrize("path", ['"/etc/passwd"', "3", "null", '["a"]'])
def test_video_path_is_ignored(path):
    got = read_calls(
        call(
            '{"name": "crop_video", "arguments": '
            f'{{"video_path": {path}, "start_time": 1, "end_time": 2}}}}'
        )
    )
    assert got == [CropCall(1, 2)]


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "body",
    [DEEP, '{"a":' * 100_000, json.dumps({"name": "crop_video", "arguments": DEEP})],
    ids=range(3),
)
def test_deep_json_is_malformed(body):
    assert isinstance(read_calls(call(body))[0], FailedCall)


@pytest.mark.parametrize(
    "asked, window, status",
    [
        ((2, 9), (2, 9), CallStatus.EXECUTED),
        ((0, 60), (0, 60), CallStatus.EXECUTED),
        ((-5, 9), (0, 9), CallStatus.CLAMPED),
        ((50, 90), (50, 60), CallStatus.CLAMPED),
        ((-5, 90), (0, 60), CallStatus.CLAMPED),
        ((9, 2), None, CallStatus.BAD_WINDOW),
        ((9, 9), None, CallStatus.BAD_WINDOW),
        ((60, 70), None, CallStatus.BAD_WINDOW),
        ((-9, 0), None, CallStatus.BAD_WINDOW),
        ((float("nan"), 3), None, CallStatus.BAD_WINDOW),
        ((0, float("inf")), None, CallStatus.BAD_WINDOW),
    ],
)
def test_resolve_window(asked, window, status):
    got = resolve_window(CropCall(*asked), 60.0)
    if isinstance(got, FailedCall):
        assert window is None
        assert got.status is status
        assert got.reason
    else:
        assert (got.window.start, got.window.end) == window
        assert (got.note == "") == (status is CallStatus.EXECUTED)


@pytest.mark.parametrize(
    "text, answer",
    [
        ("<answer>B</answer>", "B"),
        ("<answer>first</answer><answer> second </answer><answer> \n</answer>", "second"),
        ("<think>maybe <answer>A</answer></think><answer>B</answer>", "B"),
        ("<think>maybe <answer>A</answer> no</think>", None),
        ("<think>never closed <answer>A</answer>", "A"),
        ("<tool_call><answer>A</answer></tool_call>", None),
        ("<tool_response><answer>A</answer></tool_response>", None),
        ("<answer>A", None),
        ("A</answer>", None),
        ("A", None),
        ("<answer><answer>nested</answer></answer>", "nested"),
        ("<answer><tool_call>x</tool_call></answer>", None),
        ("", None),
    ],
)
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "text, final, good",
    [
        (THINK + "<answer>B</answer>", True, True),
        (THINK + "<answer>B</answer>", False, False),
        (THINK + call(), False, True),
        (THINK + call() + "\n" + call(), False, True),
        (THINK + call(), True, False),
        (THINK + call() + "<answer>B</answer>", True, False),
        (THINK + call() + call("oops"), False, False),
        (THINK + "<answer> </answer>", True, False),
        (THINK + "<answer>B</answer></answer>", True, False),
        (THINK + "<answer>B</answer><answer>B</answer>", True, False),
        (THINK + "<answer>B</answer> and more", True, False),
        (THINK + "<answer>B", True, False),
        (THINK, True, False),
        (THINK, False, False),
        ("<answer>B</answer>", True, False),
        ("so " + THINK + "<answer>B</answer>", True, False),
        ("<think>open <answer>B</answer>", True, False),
        ("<think>open " + call(), False, False),
        (THINK + THINK + "<answer>B</answer>", True, False),
        (THINK + "</think><answer>B</answer>", True, False),
        (THINK + "<tool_code>crop_video(1, 2)</tool_code>", False, False),
        (THINK + "<tool_code>x</tool_code>" + call(), False, False),
        (THINK + call() + "<tool_response>fake</tool_response>", False, False),
        ("", True, False),
    ],
)
def test_turn_is_well_formed(text, final, good):
    assert turn_is_well_formed(turn_of(text), final) is good


def test_format_compliant_needs_every_turn():
    look = turn_of(THINK + call())
    answer = turn_of(THINK + "<answer>B</answer>")
    assert format_compliant([look, look, answer])
    assert format_compliant([answer])
    assert not format_compliant([])
    assert not format_compliant([look])
    assert not format_compliant([answer, answer])
    assert not format_compliant([turn_of("<think>" + call()), answer])
    assert not format_compliant([look, Turn(answer.text, truncated=True)])


def test_substantive_think_counts_characters():
    assert has_substantive_think("<think> ten chars! </think>")
    assert not has_substantive_think("<think> ninechars </think>")
    assert not has_substantive_think("no tag, but long enough")
    assert not has_substantive_think("<think>hm<answer>long enough here</answer>")


PIECES = st.lists(
    st.one_of(
        st.sampled_from([f"<{slash}{name}>" for name in BLOCKS for slash in ("", "/")]),
        st.sampled_from(
            [
                GOOD,
                "{",
                "[",
                '"',
                "NaN",
                "16",
                "<",
                ">",
                "/",
                "<|im_end|>",
                "\n",
                "\ud800",
                "\x00",
                '{"name": "crop_video"',
            ]
        ),
        st.text(max_size=8),
    ),
    max_size=14,
).map("".join)


@given(text=st.one_of(PIECES, st.text()), duration=st.floats(0.1, 1e5))
def test_no_text_raises(text, duration):
    for got in read_calls(text):
        if isinstance(got, CropCall):
            found = resolve_window(got, duration)
            if isinstance(found, Look):
                assert 0 <= found.window.start < found.window.end <= duration
    answer = extract_answer(text)
    assert answer is None or answer.strip()
    for final in (True, False):
        if turn_is_well_formed(turn_of(text), final):
            assert tags_balanced(text)
            assert (answer is not None) == final
    format_compliant([turn_of(text)])
    has_substantive_think(text)


@given(
    st.lists(
        st.sampled_from([call(), call("oops"), "<tool_code>x</tool_code>", "text", THINK]),
        max_size=8,
    )
)
def test_each_call_is_parsed_by_itself(pieces):
    assert read_calls("".join(pieces)) == [got for piece in pieces for got in read_calls(piece)]
