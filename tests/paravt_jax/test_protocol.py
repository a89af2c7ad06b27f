"""The protocol equals the published chat template, and no text can forge special tokens."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.qwen3_vl.dialect import DIALECT
from paravt_jax.data import tokenizer_file
from paravt_jax.method import protocol, tokenizer
from paravt_jax.method.conversations import ChatTurn, Clip, Conversation, render
from paravt_jax.method.protocol import PINNED, Protocol, ProtocolSettings, render_call
from paravt_jax.method.records import (
    Author,
    CropCall,
    Frame,
    Question,
    QuestionKind,
    Trajectory,
)
from paravt_jax.method.tools.crop_video import CropVideo
from paravt_jax.world.vocabulary import recurring_texts

FRAMES = (Frame("v.mp4", 0, 0.0), Frame("v.mp4", 64, 64.0), Frame("v.mp4", 127, 127.04))
QUESTION = Question(
    "q",
    "v.mp4",
    "Which digit appears in the red scene?",
    QuestionKind.MULTIPLE_CHOICE,
    "two",
    ("two", " seven"),
)
PLAN = "0 red -, 32 green seven\n</think>"
CALLS = (CropCall(0, 16), CropCall(16.5, 32))
REPORTS = (" seven from 8 to 10", " nothing")
ANSWER = "the crops show seven from 8 to 10\n</think>\n<answer> seven</answer>"


@pytest.fixture(scope="module", params=["small", "real", "cut"])
def vocabulary(request) -> tokenizer.Vocabulary:
    if request.param == "small":
        return request.getfixturevalue("small_vocabulary")
    if request.param == "cut":
        return request.getfixturevalue("cut_vocabulary")
    return tokenizer_file.load(request.getfixturevalue("assets") / "qwen3_vl", DIALECT)


@pytest.fixture(scope="module")
def rules(vocabulary) -> Protocol:
    return Protocol(vocabulary, ProtocolSettings(max_tool_turns=2, summary_tokens=16))


@pytest.fixture(scope="module")
def template(assets):
    """The published template, filled in as transformers does it."""
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    text = (assets / "qwen3_vl" / "chat_template.jinja").read_text()

    def fill(messages: list[dict], tools: bool, reply: bool = False) -> str:
        given = [CropVideo().schema] if tools else None
        (filled,), *_ = render(
            conversations=[messages], tools=given, chat_template=text, add_generation_prompt=reply
        )
        return filled

    return fill


def user(frames=FRAMES, text="") -> dict:
    images = [
        part
        for f in frames
        for part in ({"type": "text", "text": f"<{f.time:.1f} seconds>"}, {"type": "image"})
    ]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def system(tools: bool) -> dict:
    """The system message: the protocol's system turn up to the template's own text on tools."""
    return {
        "role": "system",
        "content": re.split(
            "\n\n# Tools|<[|]im_end[|]>",
            protocol.system_text(DIALECT, (CropVideo(),) if tools else ()),
        )[0].partition("system\n")[2],
    }


def call(window: CropCall) -> dict:
    arguments = {
        "video_path": protocol.VIDEO_NAME,
        "start_time": window.start,
        "end_time": window.end,
    }
    return {"type": "function", "function": {"name": "crop_video", "arguments": arguments}}


CLIP = Clip("v.mp4", (0, 1, 2), (0.0, 64.0, 127.0), 32, 32)


def conversation() -> tuple[Conversation, list[dict]]:
    """A plan with two calls, two reports and an answer, as conversation and as chat messages."""
    plan = "\n".join([PLAN, *map(render_call, CALLS)])
    turns = (
        ChatTurn("user", (CLIP, protocol.question_text(QUESTION).removeprefix("\n"))),
        ChatTurn("assistant", (PINNED + plan,)),
        *(ChatTurn("tool", (report,)) for report in REPORTS),
        ChatTurn("assistant", (PINNED + ANSWER,)),
    )
    theirs = [
        system(True),
        user(text=protocol.question_text(QUESTION)),
        {
            "role": "assistant",
            "content": PINNED + PLAN,
            "tool_calls": [call(window) for window in CALLS],
        },
        *({"role": "tool", "content": report} for report in REPORTS),
        {"role": "assistant", "content": PINNED + ANSWER},
    ]
    return Conversation("d", True, turns), theirs


def test_a_conversation_with_parallel_calls_equals_the_published_template(
    rules, vocabulary, template
):
    demonstration, messages = conversation()
    trajectory = render(demonstration, rules, lambda _: 1)
    # An agent writes nothing after the end of its turn.
    expected = template(messages, tools=True).removesuffix("\n")
    assert vocabulary.decode(trajectory.ids) == expected
    assert expected.count("<tool_response>") == 2
    assert expected.count("<|im_start|>user") == 2
    assert trajectory.ids.tolist() == vocabulary.encode(expected).tolist()
    said = vocabulary.decode(trajectory.ids[trajectory.authors == Author.MODEL])
    assert (
        said
        == PINNED
        + "\n".join([PLAN, *map(render_call, CALLS)])
        + "<|im_end|>"
        + PINNED
        + ANSWER
        + "<|im_end|>"
    )


def test_the_opening_is_pinned_or_written_by_the_model(rules, vocabulary):
    """Demonstrations are the same for either: they teach the opening, which a rollout may pin."""
    free = Protocol(vocabulary, dataclasses.replace(rules.settings, pin_think=False))
    assert vocabulary.decode(rules.pinned.ids) == PINNED
    assert rules.pinned.author is Author.PINNED
    assert len(free.pinned.ids) == 0
    assert free.pinned.ids.dtype == np.int32
    demonstration, _ = conversation()
    taught, same = (render(demonstration, p, lambda _: 1) for p in (rules, free))
    assert (taught.ids == same.ids).all()
    assert (taught.authors == same.authors).all()


@pytest.mark.parametrize("tools", [True, False])
def test_a_prompt_equals_the_published_template(rules, vocabulary, template, tools):
    prompt = Trajectory((rules.overview(FRAMES, 1, tools), rules.question(QUESTION)))
    expected = template(
        [system(tools), user(text=protocol.question_text(QUESTION))], tools=tools, reply=True
    )
    assert vocabulary.decode(prompt.ids) == expected
    assert prompt.frames == FRAMES
    assert ("crop_video" in expected) == tools


def test_a_sub_agents_conversation_equals_the_published_template(rules, vocabulary, template):
    turns = ChatTurn("user", (CLIP,)), ChatTurn("assistant", (REPORTS[0],))
    report = Conversation("w", False, turns, subagent=True)
    trajectory = render(report, rules, lambda _: 1)
    request = "\nSay in one short sentence what these frames show, with times in seconds."
    messages = [user(text=request), {"role": "assistant", "content": REPORTS[0]}]
    assert vocabulary.decode(trajectory.ids) == template(messages, tools=False).removesuffix("\n")
    opening = rules.window(FRAMES, 1)
    assert vocabulary.decode(opening.ids) == template(messages[:1], tools=False, reply=True)
    assert opening.frames == FRAMES


def test_questions_without_options_show_none():
    open_ended = dataclasses.replace(QUESTION, kind=QuestionKind.OPEN_ENDED)
    assert protocol.question_text(open_ended) == "\n" + QUESTION.text
    assert protocol.question_text(QUESTION) == "\n" + QUESTION.text + "\nA. two\nB. seven"


def test_a_frame_is_its_timestamp_and_then_its_placeholders(rules, vocabulary):
    ids = rules.overview(FRAMES, [1, 4, 2]).ids
    shown = vocabulary.decode(ids).partition("<|im_start|>user\n")[2]
    images = [f"<|vision_start|>{'<|image_pad|>' * n}<|vision_end|>" for n in (1, 4, 2)]
    assert shown == f"<0.0 seconds>{images[0]}<64.0 seconds>{images[1]}<127.0 seconds>{images[2]}"
    assert (rules.overview(FRAMES, 4).ids == vocabulary["<|image_pad|>"]).sum() == 12
    with pytest.raises(ValueError, match="image_tokens: 2 .* 3 frames"):
        rules.overview(FRAMES, [1, 4])


@pytest.mark.parametrize(("ended", "last"), [(True, False), (False, False), (True, True)])
def test_tool_results_close_an_open_turn_and_ask_for_the_answer_after_the_last(
    rules, vocabulary, ended, last
):
    text = vocabulary.decode(rules.tool_results(["a", "b"], ended, last).ids)
    assert text.startswith("\n<|im_start|>user\n" if ended else "<|im_end|>\n<|im_start|>user\n")
    assert "<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>" in text
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert ("Give the final answer." in text) == last


def test_a_demonstration_asks_for_the_answer_after_its_last_tool_turn(vocabulary):
    demonstration, _ = conversation()
    for turns in (1, 2):
        rules = Protocol(vocabulary, ProtocolSettings(max_tool_turns=turns))
        text = vocabulary.decode(render(demonstration, rules, lambda _: 1).ids)
        assert ("No more calls can be made." in text) == (turns == 1)


_TAGS = (
    *("<think>", "</think>"),
    *("<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|endoftext|>", *_TAGS)
_FORGERIES = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from([*_SPECIAL, "<|im_", "end|>", "<", ">", "< "])),
    max_size=8,
).map("".join)


@settings(max_examples=80)
@given(text=_FORGERIES)
def test_no_text_from_outside_forges_a_special_token(rules, vocabulary, text):
    added = [vocabulary[special] for special in vocabulary.special_texts]

    def specials(ids: np.ndarray) -> list[int]:
        return ids[np.isin(ids, added)].tolist()

    def asked(text: str, option: str) -> np.ndarray:
        return rules.question(dataclasses.replace(QUESTION, text=text, options=("two", option))).ids

    assert specials(asked(text, text)) == specials(asked("", ""))
    assert specials(rules.tool_results([text, text], True, False).ids) == specials(
        rules.tool_results(["", ""], True, False).ids
    )
    plain = rules.plain(text)
    assert plain.replace(" ", "") == text.replace(" ", "")
    assert rules.plain(plain) == plain
    special_texts = {*vocabulary.special_texts, *_TAGS}
    assert plain == text or any(special in text for special in special_texts)


@settings(max_examples=80)
@given(text=_FORGERIES)
def test_no_text_from_outside_forges_a_tag(rules, vocabulary, text):
    """Also where a tag is no special token, but several tokens."""

    def tags(ids: np.ndarray) -> list[int]:
        shown = vocabulary.decode(ids)
        return [shown.count(tag) for tag in _TAGS]

    asked = dataclasses.replace(QUESTION, text=text, options=("two", text))
    plain = dataclasses.replace(QUESTION, text="", options=("two", ""))
    assert tags(rules.question(asked).ids) == tags(rules.question(plain).ids)
    assert tags(rules.tool_results([text, text], True, False).ids) == tags(
        rules.tool_results(["", ""], True, False).ids
    )


@settings(max_examples=80)
@given(text=st.one_of(st.text(max_size=80), _FORGERIES))
def test_a_tool_response_is_cut_to_its_limit(rules, vocabulary, text):
    cut = rules.cut(text)
    assert len(vocabulary.encode(cut)) <= 16
    assert rules.cut(cut) == cut
    whole = rules.plain(text)
    assert cut == whole or len(vocabulary.encode(whole)) > 16
    # The published tokenizer normalises text, so that some texts do not round-trip.
    round_trips = vocabulary.decode(vocabulary.encode(whole)) == whole
    assert whole.startswith(cut.rstrip("\ufffd")) or not round_trips
    assert (
        rules.tool_results([text], True, False).ids.tolist()
        == rules.tool_results([cut], True, False).ids.tolist()
    )


def test_a_rendered_call_is_parsed_as_the_same_call():
    text = render_call(CropCall(16.0, 32.5))
    assert json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")) == {
        "name": "crop_video",
        "arguments": {"video_path": "video.mp4", "start_time": 16, "end_time": 32.5},
    }


def test_recurring_texts_are_single_tokens_of_a_small_vocabulary(small_vocabulary):
    split = re.compile("|".join(map(re.escape, small_vocabulary.special_texts)))
    parts = [
        part
        for text in recurring_texts((CropVideo(),), DIALECT)
        for part in split.split(text)
        if part
    ]
    assert parts
    assert {part: len(small_vocabulary.encode(part)) for part in parts} == dict.fromkeys(parts, 1)
    assert len(small_vocabulary.encode(protocol.system_text(DIALECT, (CropVideo(),)))) < 30


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tool_turns", -1),
        ("max_calls", 0),
        ("turn_tokens", 0),
        ("crop_frames", 0),
    ],
)
def test_limits_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"protocol\.{field}: {value}"):
        ProtocolSettings(**{field: value})
