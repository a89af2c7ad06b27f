"""From a question to its score, and what happens to questions that cannot be played."""

from __future__ import annotations

import json

import pytest

from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.method.records import Question, QuestionKind, Subtitle, Turn
from rollout.engine.requests import SampleStop
from rollout.evaluation import split
from rollout.evaluation.benchmarks import Item
from rollout.evaluation.split import final_text, fitting, subtitled_text
from tests.rollout.conftest import Cut
from tests.rollout.evaluation.conftest import LIMITS, PLAN


def answer(text: str) -> str:
    return f"seen\n</think>\n<answer>{text}</answer>"


def by_id(lines):
    named = {line["id"]: line for line in lines}
    json.dumps(named, allow_nan=False)
    return named


def planning(player, letter_of):
    """A script that plans first and then answers `letter_of(prompt)`."""

    def turns(request):
        prompt = player.sampler.vocabulary.decode(request.ids)
        if "crop_video" in prompt and player.sampler.is_first(request):
            return PLAN
        return answer(letter_of(prompt))

    return turns


def test_every_question_of_a_split_has_a_line(player, items):
    lines = by_id(player(planning(player, lambda prompt: "B")).lines(items))
    assert len(lines) == len(items)
    assert all(line["spent"] >= 0 for line in lines.values())
    first, second, third = lines["1-1"], lines["1-2"], lines["2-1"]
    assert [line["score"] for line in (first, second, third)] == [0.0, 1.0, 0.0]
    assert (first["read"], first["calls"], first["stop"]) == ("B", 1, "answered")
    assert (first["duration"], third["duration"], second["tasks"]) == (
        "short",
        "long",
        ["OCR Problems"],
    )
    assert first["video"] == first["file"] == "data/w0.mp4"
    assert first["compliant"]
    assert len(first["overview"]) == 4
    plan, last = first["turns"]
    assert [call["status"] for call in plan["calls"]] == ["executed", "bad_window"]
    assert plan["calls"][0]["response"].startswith(" seven from 8 to 10")
    assert "".join(token["text"] for token in last["tokens"]).startswith("<think>\nseen")


def test_questions_without_a_readable_video_are_left_out(player, items):
    lines = by_id(player([answer("B")]).lines(items))
    causes = {id: line["left_out"] for id, line in lines.items() if "left_out" in line}
    assert causes == {"3-1": "missing", "3-2": "missing", "4-1": "unreadable"}
    assert "data/gone.mp4" in lines["3-1"]["reason"]


def test_an_episode_does_not_depend_on_those_beside_it(player, items):
    script = planning(player, lambda prompt: "C" if "Count" in prompt else "A")
    many = by_id(player(script, episodes=4).lines(items))
    assert max(len(wave) for wave in player.sampler.waves) == 3  # all that can be played
    one = by_id(player(script, episodes=1).lines(items[::-1]))
    assert max(len(wave) for wave in player.sampler.waves) == 1
    for line in (*many.values(), *one.values()):
        del line["spent"]
    assert many == one


@pytest.mark.parametrize(
    ("text", "unread"), [("B", False), ("none of them", True), ("A or B", True), (None, False)]
)
def test_an_answer_that_names_no_option_counts_as_unread(player, items, text, unread):
    written = "x\n</think>\n" if text is None else answer(text)
    (line,) = player([written]).lines(items[:1])
    assert (line["read"], line["unread"], line["score"]) == (text, unread, 0.0)


def test_a_blind_run_opens_no_file_and_offers_no_tool(player, items):
    lines = by_id(player([answer("A")], k=0).lines(items))
    assert len(lines) == 6
    assert [lines[id]["score"] for id in ("1-1", "1-2", "3-1")] == [1.0, 0.0, 0.0]
    for request, _ in player.sampler.main:
        assert request.frames == ()
        assert "crop_video" not in player.sampler.vocabulary.decode(request.ids)
    unplayable = lines["3-1"]
    assert (unplayable["overview"], unplayable["dispatch"], unplayable["k"]) == ([], "none", 0)


def test_subtitles_are_shown_before_the_question(player, items):
    with_subtitles = [
        Item(item.question, subtitles=f"subtitle/{item.question.video[5:-4]}.srt")
        for item in items[:3]
    ]
    lines = by_id(player([answer("A")], benchmark="videomme_wsub").lines(with_subtitles))
    assert (lines["1-1"]["subtitles"], lines["2-1"]["subtitles"]) == (2, None)
    prompts = {player.sampler.vocabulary.decode(request.ids) for request, _ in player.sampler.main}
    subtitled = [prompt for prompt in prompts if "What is said" in prompt]
    shown = {p.partition("What is said")[2].partition("How many")[0] for p in subtitled}
    assert shown == {" in the video:\n<1.0 seconds> Hello there\n<65.5 seconds> Good bye\n\n"}


def test_subtitles_that_cannot_be_read_leave_their_question_out(player, items, videos):
    playing = player([answer("A")], benchmark="videomme_wsub")
    folder = videos / "subtitle"
    (folder / "cp1252.srt").write_bytes("1\n00:01 --> 00:02\ncafé\n".encode("cp1252"))
    (folder / "words.srt").write_text("no times\n")
    for name, reason in (("cp1252", "save it as UTF-8"), ("words", "has no line of times")):
        (line,) = playing.lines([Item(items[0].question, subtitles=f"subtitle/{name}.srt")])
        assert line["left_out"] == "broken"
        assert f"{name}.srt" in line["reason"] and reason in line["reason"]


def test_a_search_finds_subtitles_that_the_prompt_had_no_room_for(player, items, monkeypatch):
    monkeypatch.setattr(split, "SUBTITLE_TOKENS", 48)
    search = '{"name": "search_subtitles", "arguments": {"query": "bye"}}'
    playing = player(
        [f"look\n</think>\n<tool_call>\n{search}\n</tool_call>", answer("A")],
        protocol=ProtocolSettings(
            tools=("crop_video", "search_subtitles"),
            turn_tokens=256,
            summary_tokens=64,
            trajectory_tokens=1024,
        ),
    )
    (line,) = playing.lines([Item(items[0].question, subtitles="subtitle/w0.srt")])
    assert line["subtitles"] == 1  # the prompt shows "Hello there" alone
    assert line["turns"][0]["calls"][0]["response"] == "<65.5 seconds> Good bye"


def test_too_many_subtitles_are_thinned_evenly(player):
    protocol = player([""]).environment.protocol
    entries = [Subtitle(float(i), i + 1.0, "words " * (1 + i % 3)) for i in range(200)]
    shown = fitting(entries, protocol, 400)
    assert 5 < len(shown) < 200
    assert shown[0] == entries[0]
    assert shown[-1].start > 150
    gaps = {round(b.start - a.start) for a, b in zip(shown, shown[1:], strict=False)}
    assert max(gaps) - min(gaps) <= 1
    assert len(protocol.vocabulary.encode(subtitled_text(shown, ""))) <= 400


def test_a_video_that_is_gone_meanwhile_leaves_its_question_out(player, items):
    (line,) = player([Cut("", SampleStop.UNREADABLE, "no such file")]).lines(items[:1])
    assert (line["left_out"], line["reason"]) == ("unreadable", "no such file")


def test_a_question_that_is_too_long_is_left_out(player):
    question = Question("q", "data/w0.mp4", "why? " * 1000, QuestionKind.OPEN_ENDED, "because")
    (line,) = player([""]).lines([Item(question)])
    assert line["left_out"] == "too_long"
    assert f"room for {LIMITS.text_tokens}" in line["reason"]


# --- the text that is scored ---


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\nhm\n</think>\n<answer> B </answer>", "B"),
        ("<think>\nhm\n</think>\nB. two", "B. two"),
        ("<think>\nhm\n</think>\n<answer>B", "B"),
        ("B", "B"),
        ("", None),
        ("<think>\nit is B", None),
        ('<think>\nx\n</think>\n<tool_call>{"name": "crop_video"}</tool_call> B', None),
        ("<think>\nx\n</think>\n<answer></answer>", None),
    ],
)
def test_the_final_text_is_the_answer_or_what_follows_the_thought(text, answer):
    assert final_text([Turn("<think>\nfirst\n</think>\n<answer>A</answer>"), Turn(text)]) == answer
    assert final_text([Turn(text, truncated=True)]) is final_text([]) is None
