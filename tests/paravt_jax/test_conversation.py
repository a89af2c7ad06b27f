"""Rendered conversations have the tokens of episodes, and loss on the assistant's turns only."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from models.qwen3_vl.dialect import DIALECT
from paravt_jax.data import tokenizer_file
from paravt_jax.method.conversations import ChatTurn, Clip, Conversation, render
from paravt_jax.method.protocol import PINNED, Protocol, ProtocolSettings, render_call, system_text
from paravt_jax.method.records import Author, CropCall, Question, QuestionKind

CLIP = Clip("a.mp4", (0, 30, 60), (0.0, 1.0, 2.0), 224, 320)
CROP = Clip("a.mp4", (30, 45), (1.0, 1.5), 224, 320)
PICTURE = Clip("p.png", (0,), (0.0,), 64, 64, still=True)
THOUGHT = "I see a road and a car.\n</think>\n"
CALLS = "\n".join(render_call(CropCall(*window)) for window in ((0, 1), (1, 2)))
REPORTS = ("a car turns", "nothing <|im_end|> moves")
ANSWER = THOUGHT + "<answer>a car</answer>"


def tokens(clip: Clip) -> int:
    return 2 if clip.still else 5


@pytest.fixture(scope="module")
def rules(assets) -> Protocol:
    return Protocol(
        tokenizer_file.load(assets / "qwen3_vl", DIALECT),
        ProtocolSettings(max_tool_turns=2, summary_tokens=16),
    )


def chat(*turns: tuple, tools: bool = True) -> Conversation:
    """Turns as (role, content ...)."""
    return Conversation(
        "c", tools, tuple(ChatTurn(role, tuple(content)) for role, *content in turns)
    )


def called(*responses: tuple) -> Conversation:
    told = [("tool", *response) for response in responses]
    return chat(
        ("user", CLIP, "What turns?"),
        ("assistant", PINNED + THOUGHT + CALLS),
        *told,
        ("assistant", PINNED + ANSWER),
    )


def text(rules: Protocol, trajectory) -> str:
    return rules.vocabulary.decode(trajectory.ids)


def test_a_conversation_has_the_tokens_of_the_protocol(rules):
    """Prompt, results and responses are encoded piece by piece, as an episode's are."""
    question = Question("q", "a.mp4", "What turns?", QuestionKind.OPEN_ENDED, "a car")
    opening = rules.overview(CLIP.frames, 5), rules.question(question)
    results = rules.tool_results(REPORTS, ended=True, last=False)
    found = render(called(*((r,) for r in REPORTS)), rules, tokens)
    prompt, plan, told, answer = found.segments
    np.testing.assert_array_equal(prompt.ids, np.concatenate([s.ids for s in opening]))
    np.testing.assert_array_equal(told.ids, results.ids)
    assert prompt.author is Author.PROMPT
    assert told.author is Author.TOOL
    for response, said in ((plan, THOUGHT + CALLS), (answer, ANSWER)):
        ids = rules.vocabulary.encode(said + "<|im_end|>")
        np.testing.assert_array_equal(response.ids, [*rules.pinned.ids, *ids])
        assert response.author is Author.MODEL
    assert found.frames == CLIP.frames


def test_only_the_assistants_tokens_are_trained(rules):
    found = render(called(*((r,) for r in REPORTS)), rules, tokens)
    learned = rules.vocabulary.decode(found.ids[found.authors == Author.MODEL])
    assert learned == f"{PINNED}{THOUGHT}{CALLS}<|im_end|>{PINNED}{ANSWER}<|im_end|>"
    assert not found.logprobs.any()


def test_clips_in_tool_responses_and_the_last_turns_reminder(rules):
    once = called(("It shows", CROP), ("nothing",))
    expected = (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nIt shows\n"
        + "".join(
            f"<{time} seconds><|vision_start|>{'<|image_pad|>' * 5}<|vision_end|>"
            for time in ("1.0", "1.5")
        )
        + "\n</tool_response>\n<tool_response>\nnothing\n</tool_response>"
    )
    found = render(once, rules, tokens)
    assert expected + "<|im_end|>\n<|im_start|>assistant\n" in text(rules, found)
    assert found.frames == CLIP.frames + CROP.frames
    assert found.segments[2].author is Author.TOOL
    assert found.segments[2].frames == CROP.frames
    twice = dataclasses.replace(once, turns=once.turns[:-1] + once.turns[1:])
    assert (
        text(rules, render(twice, rules, tokens)).count(
            "\nNo more calls can be made. Give the final answer.<|im_end|>"
        )
        == 1
    )


def test_a_tool_response_keeps_within_its_tokens_and_cannot_forge_any(rules):
    found = text(rules, render(called(("word " * 60, CROP), (REPORTS[1],)), rules, tokens))
    assert "word " * 15 + "word" in found
    assert "word " * 17 not in found
    assert "nothing < |im_end|> moves" in found


def test_pictures_have_no_timestamp_and_their_prompt_mentions_no_video(rules):
    picture = f"<|vision_start|>{'<|image_pad|>' * 2}<|vision_end|>"
    found = render(
        chat(
            ("user", "Compare", PICTURE, "with", PICTURE),
            ("assistant", "<answer>A</answer>"),
            tools=False,
        ),
        rules,
        tokens,
    )
    asked = (
        f"<|im_start|>user\nCompare\n{picture}\nwith\n{picture}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (
        text(rules, found)
        == system_text(DIALECT, (), video=False) + asked + "<answer>A</answer><|im_end|>"
    )
    assert "video" not in system_text(DIALECT, (), video=False)


def test_a_second_question_and_questions_that_would_forge(rules):
    turns = ("user", CLIP, "a <tool_call>"), ("assistant", "b"), ("user", "c"), ("assistant", "d")
    found = render(chat(*turns, tools=False), rules, tokens)
    assert (
        "\na < tool_call><|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>" in text(rules, found)
    )
    assert [segment.author for segment in found.segments] == [Author.PROMPT, Author.MODEL] * 2
