from __future__ import annotations

import ast
import dataclasses
import re

import pytest

from paravt_jax.data import video
from paravt_jax.data.frames import overview_indices, window_indices
from paravt_jax.method.conversations import Conversation
from paravt_jax.method.protocol import PINNED, ProtocolSettings
from paravt_jax.method.records import QuestionKind
from paravt_jax.world import text as world_text
from paravt_jax.world import videos as world
from paravt_jax.world.text import TextSettings

_CLEAN = TextSettings(leak=0, unclosed=0, untagged=0, one_by_one=0)


@pytest.fixture(scope="module")
def videos():
    return world.plan(world.WorldSettings(train_videos=120, heldout_videos=10))


def _mains(videos, settings: TextSettings) -> list[Conversation]:
    return list(world_text.main_conversations(videos, settings))


def _windows(videos, settings: TextSettings) -> list[Conversation]:
    return list(world_text.window_conversations(videos, settings, ProtocolSettings()))


def _said(conversation: Conversation) -> list[str]:
    """The texts after the first turn, a main agent's without the opening that it learns."""
    texts = [str(turn.content[0]) for turn in conversation.turns[1:]]
    roles = [turn.role for turn in conversation.turns[1:]]
    if not conversation.subagent:
        assert all(
            t.startswith(PINNED) == (r == "assistant") for t, r in zip(texts, roles, strict=True)
        )
    return [text.removeprefix(PINNED) for text in texts]


def _roles(conversation: Conversation) -> list[str]:
    return [turn.role for turn in conversation.turns[1:]]


def _kind(conversation: Conversation) -> QuestionKind:
    return QuestionKind(conversation.id.split("/")[1].rpartition(":")[2])


@pytest.fixture(scope="module")
def clean(videos):
    return _mains(videos, _CLEAN)


def _word(scene: world.Scene) -> str:
    assert scene.digit is not None
    return world.DIGITS[scene.digit]


def _scene(videos, record) -> world.Scene:
    clip, text = record.turns[0].content
    there = next(v for v in videos if v.path == clip.path)
    return next(s for s in there.scenes if f" at {s.start} seconds?" in text if s.digit is not None)


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
        _mains,
        _windows,
        world_text.captions,
    ):
        everything, alone = (
            list(make(videos, TextSettings())),
            list(make(videos[5:6], TextSettings())),
        )
        assert alone == everything[5 * len(alone) : 6 * len(alone)]


def test_conversations_of_a_budget_differ_in_their_question(videos):
    conversations = _mains(videos, TextSettings())
    budgets = {len(c.clips[0].indices) for c in conversations}
    assert budgets == {4, 8, 16, 32, 64}
    assert len({c.id for c in conversations}) == len(conversations) == 8 * len(videos)
    for n in range(0, len(conversations), 4):
        group = conversations[n : n + 4]
        assert len({c.clips for c in group}) == 1 and len({c.turns[0] for c in group}) == 4


def test_clips_are_what_the_files_show(small_world):
    """Frames, times and sizes are written without opening a file, and are those that it has."""
    limits = ProtocolSettings()
    for conversation in (
        *_mains(small_world.videos, TextSettings()),
        *_windows(small_world.videos, TextSettings()),
    ):
        (clip,) = conversation.clips
        info = video.probe(small_world.folder / clip.path)
        start = int(conversation.id.rpartition(":")[2]) if conversation.subagent else 0
        indices = (
            window_indices(info, start, start + world.WINDOW, limits.crop_fps, limits.crop_frames)
            if conversation.subagent
            else overview_indices(info.frames, len(clip.indices))
        )
        assert clip.indices == tuple(indices) and clip.times == tuple(info.times[indices])
        assert (clip.height, clip.width) == (info.height, info.width) and not clip.still


def test_clean_demonstrations_state_what_their_frames_show(videos, clean):
    direct = crops = 0
    for d in clean:
        scene = _scene(videos, d)
        shown = [int(t) for t in d.clips[0].times if scene.shows(t)]
        word = _word(scene)
        target = re.search(r"\ntarget (.*)\n", _said(d)[0])
        assert target and target[1] == f"{scene.start} {scene.colour} {word if shown else '-'}"
        if len(_said(d)) == 1:
            direct += 1
            assert (
                shown and f"I see {word} from {shown[0]} to {shown[-1]}\n</think>\n" in _said(d)[0]
            )
        else:
            crops += 1
            assert _roles(d) == ["assistant", "tool", "tool", "assistant"]
            assert set(_said(d)[1:3]) == {
                f" {word} from {scene.first} to {scene.last}",
                " nothing",
            }
            assert f'"start_time": {scene.start}, "end_time": {scene.start + 16}}}' in _said(d)[0]
            assert _said(d)[-1].startswith(
                f"the crops show {word} from {scene.first} to {scene.last}\n</think>\n<answer>"
            )
        answer = re.fullmatch(r"(?s).*</think>\n<answer>(.*)</answer>", _said(d)[-1])
        assert answer
        if _kind(d) is QuestionKind.MULTIPLE_CHOICE:
            assert answer[1] == f" {word}"
        elif len(_said(d)) > 1:
            assert ast.literal_eval(answer[1]) == [scene.first, scene.last]
    assert min(direct, crops) > 100


def test_crops_one_by_one_stop_where_a_report_tells(videos):
    settings = dataclasses.replace(_CLEAN, one_by_one=1, crop_when_seen=1)
    for d in _mains(videos, settings):
        scene = _scene(videos, d)
        turns = 1 if scene.first < scene.start + world.WINDOW else 2
        assert _roles(d) == ["assistant", "tool"] * turns + ["assistant"]
        assert all(text.count("<tool_call>") == 1 for text in _said(d)[: 2 * turns : 2])
        assert (
            [text == " nothing" for text in _said(d)[1 : 2 * turns : 2]] == [False]
            if turns == 1
            else [True, False]
        )


def test_what_one_frame_shows_is_no_span(videos, clean):
    for d in clean:
        if _kind(d) is QuestionKind.TEMPORAL_GROUNDING and len(_said(d)) == 1:
            first, last = ast.literal_eval(
                _said(d)[0].split("<answer>")[1].removesuffix("</answer>")
            )
            assert first < last


def test_spoilt_shares_are_the_settings(videos):
    settings = TextSettings()
    demonstrations = _mains(videos, settings)
    calling = [d for d in demonstrations if "look closer" in _said(d)[0]]
    leaked = [d for d in calling if "<tool_code>" in _said(d)[0]]
    assert abs(len(leaked) / len(calling) - settings.leak) < 0.06
    assert all(len(_said(d)) == 1 and "<tool_call>" not in _said(d)[0] for d in leaked)
    answered = [d for d in demonstrations if d not in leaked]
    assert (
        abs(
            sum("</think>" not in _said(d)[-1] for d in answered) / len(answered)
            - settings.unclosed
        )
        < 0.06
    )
    assert (
        abs(
            sum("<answer>" not in _said(d)[-1] for d in answered) / len(answered)
            - settings.untagged
        )
        < 0.06
    )


def test_spoiling_does_not_change_what_is_asked(videos):
    spoilt = [c.turns[0] for c in _mains(videos[:1], TextSettings(groups=1))]
    clean = [c.turns[0] for c in _mains(videos[:1], dataclasses.replace(_CLEAN, groups=1))]
    assert spoilt == clean


def test_guesses_appear_only_when_asked_for(videos):
    settings = dataclasses.replace(_CLEAN, guess=1.0, crop_when_seen=0.0)
    demonstrations = _mains(videos, settings)
    assert all(len(_said(d)) == 1 for d in demonstrations)


def test_windows_report_what_is_in_them(videos):
    by_path = {v.path: v for v in videos}
    demonstrations = _windows(videos, TextSettings())
    assert len({d.id for d in demonstrations}) == len(demonstrations)
    aligned = [d for d in demonstrations if d.clips[0].times[0] % world.WINDOW == 0]
    assert 0.8 < len(aligned) / len(demonstrations) < 1
    for d in demonstrations:
        (clip,) = d.clips
        start, end = clip.times[0], clip.times[-1] + world.STEP
        assert d.subagent and end - start == world.STEP * len(clip.times) == 16
        assert 0 <= start <= 112
        expected = [
            t
            for s in by_path[d.clips[0].path].scenes
            if s.digit is not None
            for t in range(s.first, s.last + 1, world.STEP)
            if start <= t < end
        ]
        text = _said(d)[0]
        assert (text == " nothing") == (not expected)
        if expected:
            assert text.endswith(f" to {expected[-1]}") and f" from {expected[0]} to " in text
    silent = sum(" nothing" == _said(d)[0] for d in aligned)
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
