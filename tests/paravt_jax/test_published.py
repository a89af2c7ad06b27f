"""Rows of the published schema: what each becomes, and which are refused for which reason."""

from __future__ import annotations

import json
import os

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paravt_jax.data.published import (
    Reason,
    Refused,
    open_table,
    read_conversation,
    read_question,
    read_table,
    require_earnable,
)
from paravt_jax.method.accuracy import accuracy
from paravt_jax.method.conversations import ChatTurn, Clip, render
from paravt_jax.method.protocol import VIDEO_NAME, Protocol, ProtocolSettings, render_call
from paravt_jax.method.records import Author, CropCall, Question, QuestionKind
from tests.paravt_jax.published_files import (
    THOUGHT,
    answered,
    call,
    called,
    image,
    rl_row,
    say,
    video,
    write_bytes,
    write_rl,
    write_sft,
)

LIMITS = ProtocolSettings()
A = "longvt_source/selftrace_0/a.mp4"
ASKED = say("user", video(A), "What?")
GOOD_END = say("assistant", "<answer>a</answer>")
RESPONSE = "<tool_response>a car</tool_response>"


def look(path: str, picture: bool, call: CropCall | None) -> Clip:
    """Stands for the choice of frames: the indices say which window was asked for."""
    if picture:
        return Clip(path, (0,), (0.0,), 32, 32, True)
    window = (int(call.start), int(call.end)) if call else (0, 1)
    return Clip(path, window, (0.0, 1.0), 32, 32)


def read(messages):
    text = messages if isinstance(messages, str) else json.dumps(messages)
    return read_conversation({"messages": text}, "x:0", LIMITS, look)


# Files.


def test_the_rows_of_a_file_are_read_in_order(tmp_path):
    rl = open_table(write_rl(tmp_path, [rl_row(A)] * 3))
    sft = open_table(write_sft(tmp_path, [answered(A)] * 2, "paravt_sft_videor1_50k.parquet"))
    assert (rl.count, sft.count) == (3, 2)
    assert list(read_table(sft)) == [{"messages": json.dumps(answered(A), ensure_ascii=False)}] * 2
    assert list(read_table(rl, batch=2)) == [rl_row(A)] * 3


@pytest.mark.parametrize("bad", [b"\xff\xfe", b"a\xff"])
def test_a_file_with_a_text_that_is_not_utf8_is_refused_by_name(tmp_path, bad):
    table = open_table(write_bytes(tmp_path, [b"[]", bad], "a.parquet"))
    with pytest.raises(ValueError, match=r"a\.parquet: not a readable .*utf-8.*download it again"):
        list(read_table(table))


def test_other_files_are_refused_by_name(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="broken.parquet"):
        open_table(tmp_path / "broken.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="other.parquet.*text.*prompt, videos.*messages"):
        open_table(tmp_path / "other.parquet")
    (tmp_path / "pointer.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="pointer.parquet: only a pointer .* git lfs pull"):
        open_table(tmp_path / "pointer.parquet")
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(ValueError, match="pipe.parquet: no regular file"):
        open_table(tmp_path / "pipe.parquet")


# Questions.


def test_a_question_is_read():
    text = "What turns?\nA. a car\nB. a boat"
    expected = Question("rl:7", A, text, QuestionKind.MULTIPLE_CHOICE, "A")
    assert read_question(rl_row(A), "rl:7") == expected


@pytest.mark.parametrize(
    ("path", "kept", "text", "expected"),
    [
        (A, A, f"<video>In {A}, or file://{A}.", f"In {VIDEO_NAME}, or {VIDEO_NAME}."),
        (f"file://{A}", A, f"In {A}?", f"In {VIDEO_NAME}?"),
        (f"file:///v/{A}", f"/v/{A}", f"<video>\nIn /v/{A}?", f"In {VIDEO_NAME}?"),
        # Whole paths only.
        ("a", "a", "<video>What a day, a/b?", f"What {VIDEO_NAME} day, a/b?"),
    ],
)
def test_the_name_of_the_video_replaces_its_path(path, kept, text, expected):
    question = read_question(rl_row(path, text), "r")
    assert (question.video, question.text) == (kept, expected)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (rl_row(A, answer=""), Reason.NO_ANSWER),
        (rl_row(A, kind="essay"), Reason.BROKEN),
        (rl_row(A, "<video>"), Reason.BROKEN),
        (rl_row(A) | {"videos": []}, Reason.BROKEN),
        (rl_row(A) | {"videos": [{"video": A}, {"video": A}]}, Reason.BROKEN),
        (rl_row(A) | {"extra_info": "[" * 100_000}, Reason.BROKEN),
        (rl_row(A) | {"extra_info": '"\ud800"'}, Reason.BROKEN),
        (rl_row(A) | {"prompt": [{"role": "user", "content": None}]}, Reason.BROKEN),
        (rl_row(A) | {"prompt": [{"role": "user", "content": "a"}] * 2}, Reason.BROKEN),
        (rl_row(A) | {"extra_info": {"answer": "A", "evidence": [9, 3]}}, Reason.BROKEN),
        ({}, Reason.BROKEN),
    ],
)
def test_bad_questions_are_refused(row, reason):
    with pytest.raises(Refused) as caught:
        read_question(row, "r")
    assert caught.value.reason is reason


# Answers.

CHOICE = "What turns?\nA. a car\nB. a boat"


def asked(answer: str, kind: QuestionKind, text: str = CHOICE) -> Question:
    return Question("q", A, text, kind, answer)


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        ("A", QuestionKind.MULTIPLE_CHOICE, CHOICE),
        ("(b)", QuestionKind.MULTIPLE_CHOICE, CHOICE),
        ("B. a boat", QuestionKind.MULTIPLE_CHOICE, CHOICE),
        ("a boat", QuestionKind.MULTIPLE_CHOICE, CHOICE),
        ("C", QuestionKind.MULTIPLE_CHOICE, "Which? A. a car B. a boat"),
        ("C", QuestionKind.MULTIPLE_CHOICE, "A. a car\nB. a boat\nC - a bus"),
        ("a car", QuestionKind.MULTIPLE_CHOICE, "A. a car\nB. a car\nC. a bus"),
        ("a train", QuestionKind.MULTIPLE_CHOICE, "What turns?"),
        ("[3, 9.5]", QuestionKind.TEMPORAL_GROUNDING, "When?"),
        ("a rabbit", QuestionKind.OPEN_ENDED, "Who?"),
    ],
)
def test_answers_that_earn_a_reward_are_accepted(answer, kind, text):
    question = asked(answer, kind, text)
    require_earnable(question)
    assert accuracy(question, answer) == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("soon", QuestionKind.TEMPORAL_GROUNDING),
        ("[9.5, 3]", QuestionKind.TEMPORAL_GROUNDING),
        ("[3, 3.0]", QuestionKind.TEMPORAL_GROUNDING),
        ("?!", QuestionKind.OPEN_ENDED),
    ],
)
def test_wrong_answers_are_refused(answer, kind):
    with pytest.raises(Refused) as caught:
        require_earnable(asked(answer, kind))
    assert caught.value.reason is Reason.IMPOSSIBLE


# Conversations.


def test_a_conversation_without_calls():
    conversation = read(answered(A))
    assert not conversation.tools
    assert conversation.turns == (
        ChatTurn("user", (look(A, False, None), "What turns?")),
        ChatTurn("assistant", (f"{THOUGHT}<answer>a car</answer>",)),
    )


def test_calls_take_the_protocols_form_and_paths_are_hidden():
    conversation = read(called(A, [(3, 9), (20.5, 31)]))
    assert conversation.tools
    roles = [turn.role for turn in conversation.turns]
    assert roles == ["user", "assistant", "tool", "tool", "assistant"]
    user, asked, first, second, _ = conversation.turns
    assert user.content[1] == f"What turns? The video is {VIDEO_NAME}."
    calls = "\n".join(render_call(CropCall(*window)) for window in ((3, 9), (20.5, 31)))
    assert asked.content == (THOUGHT + calls,)
    assert first.content == ("From 3 to 9 s a car turns.",)
    assert second.content == ("From 20.5 to 31 s a car turns.",)


def test_responses_within_one_user_turn_and_files_in_them():
    text = "<tool_response>\na car\n</tool_response>\n<tool_response>a road"
    turn = say("user", text, video("b.mp4"), image("c.png"), "</tool_response>")
    first, second = read(called(A, [(3, 9), (20, 31)], turn)).turns[2:4]
    assert first.content == ("a car",)
    assert second.content == ("a road", look("b.mp4", False, None), look("c.png", True, None))


def test_a_crop_of_the_conversations_own_video_is_the_window_that_was_called_for():
    turn = say("tool", "Here it is.", video("file://" + A))
    (clip,) = read(called(A, [(3, 9)], turn)).turns[2].clips
    assert (clip.path, clip.indices) == (A, (3, 9))


CALLS = THOUGHT + call(3, 9) + call(20, 31)
END = f"{THOUGHT}<answer>a car</answer>"
LANE = "<tool_response>\na lane\n</tool_response>"


@pytest.mark.parametrize(
    "messages",
    [
        [say("assistant", CALLS + "\n" + RESPONSE + LANE + "\n" + END)],
        [say("assistant", f"{CALLS}\n<video>\n", RESPONSE, LANE, END)],
        [say("assistant", CALLS), say("tool", RESPONSE, LANE), say("assistant", END)],
        [say("assistant", CALLS), say("assistant", f"{RESPONSE}\n{LANE}\n{END}")],
        [say("assistant", CALLS), say("user", RESPONSE, LANE), say("assistant", END)],
    ],
)
def test_tool_responses_inside_a_response_become_turns_and_are_not_trained_on(
    messages, small_vocabulary
):
    conversation = read([ASKED, *messages])
    apart = [say("tool", "a car"), say("tool", "a lane")]
    assert conversation == read([ASKED, say("assistant", CALLS), *apart, say("assistant", END)])
    trajectory = render(conversation, Protocol(small_vocabulary, LIMITS), lambda clip: 1)
    trained = small_vocabulary.decode(trajectory.ids[trajectory.authors == Author.MODEL])
    assert "<answer>a car</answer>" in trained and "a lane" not in trained
    assert "tool_response" not in trained


def test_an_empty_tool_response_is_one():
    responses = say("tool", f"<tool_response> </tool_response>{LANE}")
    turns = read([ASKED, say("assistant", CALLS), responses, say("assistant", END)]).turns
    assert [turn.content for turn in turns if turn.role == "tool"] == [(), ("a lane",)]


def test_files_of_a_row_keep_their_names_apart():
    text = f"Is {A} longer than file://b.mp4 and video.mp4? See a.png, c.png."
    files = (video(A), video("b.mp4"), video("video.mp4"), image("a.png"), image("c.png"))
    shown = read([say("user", *files, text), GOOD_END]).turns[0].content[-1]
    names = "video.mp4 longer than video_2.mp4 and video_3.mp4? See image.jpg, image_2.jpg."
    assert shown == f"Is {names}"


def texts_and_paths(parts):
    return [part if isinstance(part, str) else part.path for part in parts]


def test_pictures_keep_their_places_between_texts():
    content = ["Compare <image>", image("a.png"), "with", image("b.jpg"), "please."]
    turns = read([say("user", *content), say("assistant", "<answer>equal</answer>")]).turns
    expected = ["Compare", "a.png", "with", "b.jpg", "please."]
    assert texts_and_paths(turns[0].content) == expected


def test_a_single_text_follows_its_files():
    asked = say("user", "<video>What?", video(A), video("b.mp4"))
    turns = read([asked, say("assistant", "x")]).turns
    assert texts_and_paths(turns[0].content) == [A, "b.mp4", "What?"]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("{", Reason.BROKEN),
        ([{"role": "user"}], Reason.BROKEN),
        ([say("critic", "a")], Reason.BROKEN),
        ([say("user", {"type": "text"}), GOOD_END], Reason.BROKEN),
        ([say("user", video(A)), GOOD_END], Reason.BROKEN),
        ([ASKED], Reason.NO_ANSWER),
        ([ASKED, say("assistant", " ")], Reason.NO_ANSWER),
        ([ASKED, ASKED, GOOD_END], Reason.PROTOCOL),
        ([GOOD_END], Reason.PROTOCOL),
        ([ASKED, GOOD_END, GOOD_END], Reason.PROTOCOL),
        ([ASKED, say("assistant", "a", image("b.png"))], Reason.PROTOCOL),
        ([ASKED, say("assistant", "a<|im_start|>b")], Reason.PROTOCOL),
        ([ASKED, say("assistant", "<tool_response>b")], Reason.PROTOCOL),
        ([ASKED, say("assistant", "<tool_code>b</tool_code>"), GOOD_END], Reason.PROTOCOL),
        ([ASKED, say("assistant", "<tool_call>{}</tool_call>"), GOOD_END], Reason.PROTOCOL),
        ([ASKED, say("assistant", call(1, 2)), GOOD_END], Reason.PROTOCOL),
        ([ASKED, say("assistant", call(1, 2)), say("user", "go on"), GOOD_END], Reason.PROTOCOL),
        ([ASKED, say("assistant", call(1, 2) * 2), say("tool", "a"), GOOD_END], Reason.PROTOCOL),
        (
            [ASKED, say("assistant", call(1, 2)), say("tool", "a"), say("tool", "b"), GOOD_END],
            Reason.PROTOCOL,
        ),
        ([ASKED, say("assistant", call(1, 2) * 6), GOOD_END], Reason.PROTOCOL),
        ([ASKED, *[say("assistant", call(1, 2)), say("tool", "a")] * 4, GOOD_END], Reason.PROTOCOL),
        (called(A, [(1, 2)], say("tool", "so <tool_response>a</tool_response>")), Reason.PROTOCOL),
        (
            [ASKED, say("assistant", CALLS), say("tool", f"so {RESPONSE}"), say("assistant", END)],
            Reason.PROTOCOL,
        ),
        ([ASKED, GOOD_END, say("user", RESPONSE), GOOD_END], Reason.PROTOCOL),
        ([ASKED, say("assistant", RESPONSE, "so")], Reason.PROTOCOL),
        (
            [ASKED, say("assistant", call(1, 2), video("b.mp4"), "and", RESPONSE), GOOD_END],
            Reason.PROTOCOL,
        ),
        (
            [ASKED, say("assistant", call(1, 2) + "<answer>a</answer>"), say("tool", "a")],
            Reason.PROTOCOL,
        ),
        ([ASKED, say("assistant", "Well. " + END)], Reason.PROTOCOL),
        (
            [say("user", video(A), video("b.mp4"), "?"), say("assistant", call(1, 2, "b.mp4"))],
            Reason.PROTOCOL,
        ),
    ],
)
def test_conversations_that_the_protocol_cannot_express_are_refused(messages, reason):
    with pytest.raises(Refused) as caught:
        read(messages)
    assert caught.value.reason is reason


PARTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        [
            call(1, 2),
            THOUGHT,
            "<tool_response>",
            "</tool_response>",
            "<tool_call>",
            "<answer>a</answer>",
        ]
    ),
    st.sampled_from([video(A), image("a.png"), video("file:///b.mp4")]),
    st.sampled_from([None, 3, [], {}, {"type": "text"}, {"type": "video_url", "video_url": 1}]),
)
CHATS = st.lists(
    st.builds(
        lambda role, parts: say(role, *parts),
        st.sampled_from(["system", "user", "assistant", "tool"]),
        st.lists(PARTS, max_size=4),
    ),
    max_size=6,
)


@given(CHATS)
def test_any_conversation_is_read_or_refused(messages):
    for row in ({"messages": messages}, {"messages": json.dumps(messages)}):
        try:
            conversation = read_conversation(row, "x", LIMITS, look)
        except Refused:
            continue
        assert conversation.turns[0].role == "user"
        assert conversation.turns[-1].role == "assistant"
