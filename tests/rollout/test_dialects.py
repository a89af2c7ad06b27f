"""A model reads and writes the marks and calls of its family, and no others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.qwen3_vl.dialect import DIALECT as CHATML
from paravt_jax.method.conversations import render, rewrite_calls
from paravt_jax.method.parsing import BLOCKS, JSON_CALLS, parse_calls
from paravt_jax.method.protocol import PINNED, Protocol, ProtocolSettings, render_call
from paravt_jax.method.records import Author, Call, CallStatus, CropCall, FailedCall, ToolCall
from paravt_jax.method.tokenizer import Dialect
from paravt_jax.method.tools.crop_video import CropVideo
from paravt_jax.method.tools.tool import Tool
from paravt_jax.world import text as world_text
from paravt_jax.world.vocabulary import world_vocabulary
from rollout.agent.episode import Environment, EpisodeSettings, play
from rollout.engine.requests import run
from tests.marked_family import DIALECT as MARKED
from tests.marked_family import XML_CALLS
from tests.rollout.conftest import Scripted

CROP = CropVideo()
SYNTAXES = pytest.mark.parametrize("syntax", [JSON_CALLS, XML_CALLS])
DIALECTS = pytest.mark.parametrize("dialect", [CHATML, MARKED])
# What a model may write in place of a call: pieces of both syntaxes, tags, marks and any text.
HOSTILE = st.lists(
    st.sampled_from(
        [
            *(f"<{slash}{name}>" for name in BLOCKS for slash in ("", "/")),
            *("<function=crop_video>", "</function>", "<function=>", "<parameter=start_time>"),
            *("<parameter=end_time>", "</parameter>", '{"name": "crop_video"', "{", "[", '"', "}"),
            *("[end]", "<|im_end|>", "12", "28", "\n", "NaN", "\x00", "\ud800"),
            *(syntax.write("crop_video", CROP.example) for syntax in (JSON_CALLS, XML_CALLS)),
        ]
    )
    | st.text(max_size=8),
    max_size=14,
).map("".join)


class Length(Tool):
    """A custom tool without arguments."""

    name = "video_length"
    description = "Says how long the video is."
    parameters = {}
    required = ()
    example = {}
    hint = "Call video_length."

    def parse(self, arguments):
        return ToolCall(self.name, dict(arguments))

    def run(self, call, video):
        return f"{video.duration:.1f} s"


@SYNTAXES
def test_a_tool_without_arguments_can_be_called(syntax):
    text = f"<tool_call>\n{syntax.write('video_length', {})}\n</tool_call>"
    assert parse_calls(text, (Length(),), syntax) == [ToolCall("video_length", {})]


@SYNTAXES
@given(st.text("abc_", min_size=1), st.dictionaries(st.text("abc_", min_size=1), st.text("ab {<")))
def test_what_is_written_is_read_again(syntax, name, arguments):
    arguments = {"more": "x", **{key: value.strip() for key, value in arguments.items()}}
    assert syntax.read(syntax.write(name, arguments)) == (name, arguments)


@SYNTAXES
@given(st.integers(0, 800_000), st.integers(0, 800_000))
def test_a_stored_call_reads_the_same_in_every_syntax(syntax, eighth, other):
    start, end = eighth / 8, other / 8
    stored = render_call(CropCall(start, end))
    text = rewrite_calls(f"<think>\n</think>\n{stored}\n{stored}", syntax)
    assert parse_calls(text, (CROP,), syntax) == [CropCall(start, end)] * 2
    assert (text == f"<think>\n</think>\n{stored}\n{stored}") == (syntax is JSON_CALLS)


@SYNTAXES
@given(text=HOSTILE)
def test_no_text_raises(syntax, text):
    calls = parse_calls(text, (CROP,), syntax)
    assert all(isinstance(call, Call | FailedCall) for call in calls)
    rewrite_calls(text, syntax)


@DIALECTS
def test_demonstrations_and_episodes_have_the_marks_and_calls_of_their_family(
    dialect: Dialect, small_world, small_features, small_questions
):
    limits = ProtocolSettings(max_tool_turns=2, turn_tokens=96)
    vocabulary = world_vocabulary(limits, dialect)
    protocol = Protocol(vocabulary, limits)
    settings = world_text.TextSettings(leak=0, unclosed=0, untagged=0, look=1, both=1)
    demonstration = next(
        conversation
        for conversation in world_text.main_conversations(small_world.videos, settings)
        if any(turn.role == "tool" for turn in conversation.turns)
    )
    shown = render(demonstration, protocol, lambda clip: 1)
    # An agent that writes the same responses, without the opening that is pinned.
    responses = [
        vocabulary.decode_turn(segment.ids).removeprefix(PINNED)
        for segment in shown.segments
        if segment.author is Author.MODEL
    ]
    environment = Environment(protocol, small_features)
    asked = play(environment, small_questions[0], EpisodeSettings(4, 0.0), seed=0)
    (episode,) = run(Scripted(vocabulary, responses), [asked])
    assert [outcome.status for outcome in episode.turns[0].calls] == [CallStatus.EXECUTED] * 2
    assert episode.answer is not None
    other = CHATML if dialect is MARKED else MARKED
    for trajectory in (shown, episode.trajectory):
        text = vocabulary.decode(trajectory.ids)
        assert dialect.open("user") in text and dialect.calls.request in text
        assert ("<function=crop_video><parameter=" in text) == (dialect is MARKED)
        assert not any(mark in text for mark in other.special)
