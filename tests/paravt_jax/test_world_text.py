from __future__ import annotations

import ast
import dataclasses
import re

import pytest

from paravt_jax.data import video
from paravt_jax.method.records import QuestionKind
from paravt_jax.world import text as world_text
from paravt_jax.world import videos as world
from paravt_jax.world.text import TextSettings

_CLEAN = TextSettings(leak=0, unclosed=0, untagged=0, one_by_one=0)


@pytest.fixture(scope="module")
def videos():
    return world.plan(world.WorldSettings(train_videos=120, heldout_videos=10))


@pytest.fixture(scope="module")
def clean(videos):
    return [d for group in world_text.main_demonstrations(videos, _CLEAN) for d in group]


def _word(scene: world.Scene) -> str:
    assert scene.digit is not None
    return world.DIGITS[scene.digit]


def _scene(videos, record) -> world.Scene:
    there = next(v for v in videos if v.path == record.video)
    return next(
        s
        for s in there.scenes
        if f" at {s.start} seconds?" in record.question.text
        if s.digit is not None
    )


def test_questions_have_true_answers_and_different_ids(videos):
    questions = list(world_text.questions(videos, TextSettings()))
    assert len(questions) == 2 * len(videos) == len({q.id for q in questions})
    choice = [q for q in questions if q.kind is QuestionKind.MULTIPLE_CHOICE]
    assert 0.5 < len(choice) / len(questions) < 0.7
    by_path = {v.path: v for v in videos}
    for q in questions:
        scene = next(s for s in by_path[q.video].scenes if f" at {s.start} seconds?" in q.text)
        if q.kind is QuestionKind.MULTIPLE_CHOICE:
            assert q.answer == _word(scene)
            assert len(set(q.options)) == 4 and q.answer in q.options
            elsewhere = {
                world.DIGITS[s.digit] for s in by_path[q.video].scenes if s.digit is not None
            } - {q.answer}
            assert len(elsewhere & set(q.options)) == min(2, len(elsewhere))
        else:
            assert ast.literal_eval(q.answer) == [scene.first, scene.last] and q.options == ()
    places = [q.options.index(q.answer) for q in choice]
    assert {0, 1, 2, 3} == set(places)


def test_records_depend_on_their_own_video_only(videos):
    for make in (
        world_text.questions,
        world_text.main_demonstrations,
        world_text.window_demonstrations,
        world_text.captions,
    ):
        everything, alone = (
            list(make(videos, TextSettings())),
            list(make(videos[5:6], TextSettings())),
        )
        assert alone == everything[5 * len(alone) : 6 * len(alone)]


def test_groups_share_video_and_budget_and_differ_in_question(videos):
    groups = list(world_text.main_demonstrations(videos, TextSettings()))
    assert {group[0].frames for group in groups} == {4, 8, 16, 32, 64}
    for group in groups:
        assert len({(d.video, d.frames) for d in group}) == 1
        assert len({d.id for d in group}) == len(group) == 4
    assert len({d.id for group in groups for d in group}) == 4 * len(groups)


def test_clean_demonstrations_state_what_their_frames_show(videos, clean):
    direct = crops = 0
    for d in clean:
        scene = _scene(videos, d)
        shown = [
            t for t in world.STEP * video.overview_indices(world.FRAMES, d.frames) if scene.shows(t)
        ]
        word = _word(scene)
        target = re.search(r"\ntarget (.*)\n", d.messages[0].content)
        assert target and target[1] == f"{scene.start} {scene.colour} {word if shown else '-'}"
        if len(d.messages) == 1:
            direct += 1
            assert (
                shown
                and f"I see {word} from {shown[0]} to {shown[-1]}\n</think>\n"
                in d.messages[0].content
            )
        else:
            crops += 1
            assert [m.role for m in d.messages] == ["assistant", "tool", "tool", "assistant"]
            assert {m.content for m in d.messages[1:3]} == {
                f" {word} from {scene.first} to {scene.last}",
                " nothing",
            }
            assert (
                f'"start_time": {scene.start}, "end_time": {scene.start + 16}}}'
                in d.messages[0].content
            )
            assert d.messages[-1].content.startswith(
                f"the crops show {word} from {scene.first} to {scene.last}\n</think>\n<answer>"
            )
        answer = re.fullmatch(r"(?s).*</think>\n<answer>(.*)</answer>", d.messages[-1].content)
        assert answer
        if d.question.kind is QuestionKind.MULTIPLE_CHOICE:
            assert answer[1] == f" {d.question.answer}"
        elif len(d.messages) > 1:
            assert answer[1] == d.question.answer
    assert min(direct, crops) > 100


def test_crops_one_by_one_stop_where_a_report_tells(videos):
    settings = dataclasses.replace(_CLEAN, one_by_one=1, crop_when_seen=1)
    for d in (d for group in world_text.main_demonstrations(videos, settings) for d in group):
        scene = _scene(videos, d)
        turns = 1 if scene.first < scene.start + world.WINDOW else 2
        assert [m.role for m in d.messages] == ["assistant", "tool"] * turns + ["assistant"]
        assert all(m.content.count("<tool_call>") == 1 for m in d.messages[: 2 * turns : 2])
        assert (
            [m.content == " nothing" for m in d.messages[1 : 2 * turns : 2]] == [False]
            if turns == 1
            else [True, False]
        )


def test_what_one_frame_shows_is_no_span(videos, clean):
    for d in clean:
        if d.question.kind is QuestionKind.TEMPORAL_GROUNDING and len(d.messages) == 1:
            first, last = ast.literal_eval(
                d.messages[0].content.split("<answer>")[1].removesuffix("</answer>")
            )
            assert first < last


def test_spoilt_shares_are_the_settings(videos):
    settings = TextSettings()
    demonstrations = [
        d for group in world_text.main_demonstrations(videos, settings) for d in group
    ]
    calling = [d for d in demonstrations if "look closer" in d.messages[0].content]
    leaked = [d for d in calling if "<tool_code>" in d.messages[0].content]
    assert abs(len(leaked) / len(calling) - settings.leak) < 0.06
    assert all(len(d.messages) == 1 and "<tool_call>" not in d.messages[0].content for d in leaked)
    answered = [d for d in demonstrations if d not in leaked]
    assert (
        abs(
            sum("</think>" not in d.messages[-1].content for d in answered) / len(answered)
            - settings.unclosed
        )
        < 0.06
    )
    assert (
        abs(
            sum("<answer>" not in d.messages[-1].content for d in answered) / len(answered)
            - settings.untagged
        )
        < 0.06
    )


def test_spoiling_does_not_change_what_is_asked(videos):
    spoilt = [
        d.id
        for group in world_text.main_demonstrations(videos[:1], TextSettings(groups=1))
        for d in group
    ]
    clean = [
        d.id
        for group in world_text.main_demonstrations(
            videos[:1], dataclasses.replace(_CLEAN, groups=1)
        )
        for d in group
    ]
    assert spoilt == clean


def test_guesses_appear_only_when_asked_for(videos):
    settings = dataclasses.replace(_CLEAN, guess=1.0, crop_when_seen=0.0)
    demonstrations = [
        d for group in world_text.main_demonstrations(videos, settings) for d in group
    ]
    assert all(len(d.messages) == 1 for d in demonstrations)


def test_windows_report_what_is_in_them(videos):
    by_path = {v.path: v for v in videos}
    demonstrations = list(world_text.window_demonstrations(videos, TextSettings()))
    assert len({d.id for d in demonstrations}) == len(demonstrations)
    aligned = [d for d in demonstrations if d.window and d.window[0] % world.WINDOW == 0]
    assert 0.8 < len(aligned) / len(demonstrations) < 1
    for d in demonstrations:
        assert d.window is not None
        start, end = d.window
        assert (
            end - start == world.STEP * d.frames == 16 and d.question is None and 0 <= start <= 112
        )
        expected = [
            t
            for s in by_path[d.video].scenes
            if s.digit is not None
            for t in range(s.first, s.last + 1, world.STEP)
            if start <= t < end
        ]
        text = d.messages[0].content
        assert (text == " nothing") == (not expected)
        if expected:
            assert text.endswith(f" to {expected[-1]}") and f" from {expected[0]} to " in text
    silent = sum(" nothing" == d.messages[0].content for d in aligned)
    assert 0.15 < silent / len(aligned) < 0.35


def test_captions_name_what_is_on_the_frame(videos):
    by_path = {v.path: v for v in videos}
    captions = list(world_text.captions(videos, TextSettings()))
    for caption in captions:
        scene = next(s for s in by_path[caption.video].scenes if s.start <= caption.time < s.end)
        assert caption.words == (
            (scene.colour, _word(scene)) if scene.shows(caption.time) else (scene.colour,)
        )
    assert 0.5 <= sum(len(c.words) == 2 for c in captions) / len(captions) < 0.65


@pytest.mark.parametrize("wrong", [{"leak": -0.1}, {"questions": 3}, {"groups": 6}])
def test_impossible_settings_are_named(wrong):
    with pytest.raises(ValueError, match=f"world_text.*{next(iter(wrong))}"):
        TextSettings(**wrong)
