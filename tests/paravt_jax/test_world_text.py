"""Texts about the small world: true answers, honest demonstrations, and spoilt ones as asked."""

from __future__ import annotations

import ast
import collections
import dataclasses
import re

import pytest

from paravt_jax.data import video
from paravt_jax.data.frames import overview_indices, window_indices
from paravt_jax.method.conversations import Conversation
from paravt_jax.method.protocol import PINNED, ProtocolSettings
from paravt_jax.method.records import QuestionKind
from paravt_jax.method.tools.crop_video import CROP_FPS
from paravt_jax.world import text as world_text
from paravt_jax.world import videos as world
from paravt_jax.world.text import TextSettings

# Good format, and a strong prior: both halves of the scene wherever the overview shows no answer.
CLEAN = TextSettings(
    look=1,
    look_when_shown=0.5,
    both=1,
    toolless=0,
    ground_by_overview=True,
    leak=0,
    unclosed=0,
    untagged=0,
)
# The naive demonstrations of the defaults, in good format.
NAIVE = TextSettings(leak=0, unclosed=0, untagged=0)


@pytest.fixture(scope="module")
def videos():
    return world.plan(world.WorldSettings(train_videos=120, heldout_videos=10))


def mains(videos, settings: TextSettings) -> list[Conversation]:
    return list(world_text.main_conversations(videos, settings))


def windows(videos, settings: TextSettings) -> list[Conversation]:
    return list(world_text.window_conversations(videos, settings, ProtocolSettings()))


def said(conversation: Conversation) -> list[str]:
    """The texts after the first turn, without the pinned opening of a main agent's turns."""
    texts = []
    for turn in conversation.turns[1:]:
        text = str(turn.content[0])
        if not conversation.subagent:
            assert text.startswith(PINNED) == (turn.role == "assistant")
        texts.append(text.removeprefix(PINNED))
    return texts


def roles(conversation: Conversation) -> list[str]:
    return [turn.role for turn in conversation.turns[1:]]


def kind_of(conversation: Conversation) -> QuestionKind:
    return QuestionKind(conversation.id.split("/")[1].rpartition(":")[2])


@pytest.fixture(scope="module")
def clean(videos):
    return mains(videos, CLEAN)


def word_of(scene: world.Scene) -> str:
    assert scene.digit is not None
    return world.DIGITS[scene.digit]


def scene_of(videos, conversation: Conversation) -> world.Scene:
    """The scene that a conversation asks about."""
    (clip,) = conversation.clips
    text = str(conversation.turns[0].content[1])
    return scene_named(next(v for v in videos if v.path == clip.path), text)


def scene_named(video_: world.WorldVideo, question: str) -> world.Scene:
    return next(s for s in video_.scenes if f" at {s.start} seconds?" in question)


def test_questions_have_true_answers_and_different_ids(videos):
    questions = list(world_text.questions(videos, TextSettings()))
    assert len(questions) == len({q.id for q in questions}) == 2 * len(videos)
    by_path = {video_.path: video_ for video_ in videos}
    places = []
    for question in questions:
        video_ = by_path[question.video]
        scene = scene_named(video_, question.text)
        if question.kind is QuestionKind.TEMPORAL_GROUNDING:
            assert ast.literal_eval(question.answer) == [scene.first, scene.last]
            assert question.options == ()
            continue
        assert question.answer == word_of(scene)
        assert len(set(question.options)) == 4
        places.append(question.options.index(question.answer))
        words = {word_of(s) for s in video_.scenes if s.digit is not None}
        elsewhere = words - {question.answer}
        assert len(elsewhere & set(question.options)) == min(2, len(elsewhere))
    assert 0.5 < len(places) / len(questions) < 0.7
    assert set(places) == {0, 1, 2, 3}


def test_records_depend_on_their_own_video_only(videos):
    for make in (
        world_text.questions,
        mains,
        windows,
        world_text.captions,
    ):
        everything = list(make(videos, TextSettings()))
        alone = list(make(videos[5:6], TextSettings()))
        assert alone == everything[5 * len(alone) : 6 * len(alone)]


def test_conversations_of_a_budget_differ_in_their_question(videos):
    conversations = mains(videos, TextSettings())
    budgets = {len(c.clips[0].indices) for c in conversations}
    assert budgets == {4, 8, 16, 32, 64}
    assert len({c.id for c in conversations}) == len(conversations) == 8 * len(videos)
    for n in range(0, len(conversations), 4):
        group = conversations[n : n + 4]
        assert len({c.clips for c in group}) == 1
        assert len({c.turns[0] for c in group}) == 4


def test_clips_equal_those_of_the_files(small_world):
    """Frames, times and sizes are written without opening a file."""
    for conversation in mains(small_world.videos, TextSettings()):
        (clip,) = conversation.clips
        info = video.probe(small_world.folder / clip.path)
        assert_shows(clip, info, overview_indices(info.frames, len(clip.indices)))
    limits = ProtocolSettings()
    for conversation in windows(small_world.videos, TextSettings()):
        (clip,) = conversation.clips
        info = video.probe(small_world.folder / clip.path)
        start = int(conversation.id.rpartition(":")[2])
        end = start + world.WINDOW
        expected = window_indices(info, start, end, CROP_FPS, limits.crop_frames)
        assert_shows(clip, info, expected)


def assert_shows(clip, info, indices) -> None:
    assert clip.indices == tuple(indices)
    assert clip.times == tuple(info.times[indices])
    assert (clip.height, clip.width) == (info.height, info.width)
    assert not clip.still


def test_clean_demonstrations_describe_what_the_overview_shows(videos, clean):
    for demonstration in clean:
        scene = scene_of(videos, demonstration)
        visible = any(scene.shows(time) for time in demonstration.clips[0].times)
        target = re.search(r"\ntarget (.*)\n", said(demonstration)[0])
        assert target
        word = word_of(scene) if visible else "-"
        assert target[1] == f"{scene.start} {scene.colour} {word}"


def test_clean_demonstrations_answer_from_the_overview_or_from_crops(videos, clean):
    counts = collections.Counter()
    for demonstration in clean:
        scene = scene_of(videos, demonstration)
        word = word_of(scene)
        texts = said(demonstration)
        answer = re.fullmatch(r"(?s).*</think>\n<answer>(.*)</answer>", texts[-1])
        assert answer
        if kind_of(demonstration) is QuestionKind.MULTIPLE_CHOICE:
            assert answer[1] == f" {word}"
        if len(texts) == 1:
            counts["overview"] += 1
            seen = [int(time) for time in demonstration.clips[0].times if scene.shows(time)]
            assert f"I see {word} from {seen[0]} to {seen[-1]}\n</think>\n" in texts[0]
            if kind_of(demonstration) is QuestionKind.TEMPORAL_GROUNDING:
                # One frame does not say how long a digit stays.
                assert ast.literal_eval(answer[1]) == [seen[0], seen[-1]]
                assert len(seen) > 1
        else:
            counts["crops"] += 1
            span = f"{word} from {scene.first} to {scene.last}"
            assert roles(demonstration) == ["assistant", "tool", "tool", "assistant"]
            assert set(texts[1:3]) == {f" {span}", " nothing"}
            assert f'"start_time": {scene.start}, "end_time": {scene.start + 16}}}' in texts[0]
            assert texts[-1].startswith(f"the crops show {span}\n</think>\n<answer>")
            if kind_of(demonstration) is QuestionKind.TEMPORAL_GROUNDING:
                assert ast.literal_eval(answer[1]) == [scene.first, scene.last]
    assert min(counts["overview"], counts["crops"]) > 100


def test_the_settings_decide_how_many_demonstrations_are_spoilt(videos):
    settings = dataclasses.replace(CLEAN, leak=0.3, unclosed=0.3, untagged=0.2)
    demonstrations = mains(videos, settings)
    calling = [d for d in demonstrations if "look closer" in said(d)[0]]
    leaked = [d for d in calling if "<tool_code>" in said(d)[0]]
    assert len(leaked) / len(calling) == pytest.approx(settings.leak, abs=0.06)
    for demonstration in leaked:
        assert len(said(demonstration)) == 1
        assert "<tool_call>" not in said(demonstration)[0]
    answers = [said(d)[-1] for d in demonstrations if d not in leaked]
    unclosed = sum("</think>" not in answer for answer in answers)
    assert unclosed / len(answers) == pytest.approx(settings.unclosed, abs=0.06)
    untagged = sum("<answer>" not in answer for answer in answers)
    assert untagged / len(answers) == pytest.approx(settings.untagged, abs=0.06)


def shows_answer(videos, demonstration: Conversation) -> bool:
    """Whether the overview answers the question; by default it answers only choice."""
    if kind_of(demonstration) is QuestionKind.TEMPORAL_GROUNDING:
        return False
    scene = scene_of(videos, demonstration)
    return any(scene.shows(time) for time in demonstration.clips[0].times)


def test_the_settings_decide_how_often_naive_demonstrations_look(videos):
    looking = collections.defaultdict(list)
    both, tools = [], []
    for demonstration in mains(videos, NAIVE):
        tools.append(demonstration.tools)
        looks = "tool" in roles(demonstration)
        assert demonstration.tools or not looks
        if demonstration.tools:
            looking[shows_answer(videos, demonstration)].append(looks)
        if looks:
            both.append(roles(demonstration).count("tool") == 2)

    def share(values: list[bool]) -> float:
        return sum(values) / len(values)

    assert share(tools) == pytest.approx(1 - NAIVE.toolless, abs=0.04)
    assert share(looking[False]) == pytest.approx(NAIVE.look, abs=0.05)
    assert share(looking[True]) == pytest.approx(NAIVE.look_when_shown, abs=0.06)
    assert share(both) == pytest.approx(NAIVE.both, abs=0.07)


def test_naive_demonstrations_never_tell_what_nobody_saw(videos):
    guesses = []
    for demonstration in mains(videos, NAIVE):
        scene = scene_of(videos, demonstration)
        last = said(demonstration)[-1]
        reported = [text for text in said(demonstration)[1:-1] if text != " nothing"]
        word = word_of(scene)
        if shows_answer(videos, demonstration) or reported:
            assert f" {word} from " in last
            continue
        # Frames may show the digit of a grounding question, but not, by default, its span.
        visible = any(scene.shows(time) for time in demonstration.clips[0].times)
        direct = len(said(demonstration)) == 1
        finding = f"I see {word}" if visible and direct else " nothing"
        assert f"{finding}\n</think>" in last
        answer = re.search(r"<answer>(.*)</answer>", last)
        assert answer
        if kind_of(demonstration) is QuestionKind.MULTIPLE_CHOICE:
            assert answer[1] in str(demonstration.turns[0].content[1])
            guesses.append(answer[1] == f" {word}")
        else:
            first, end = ast.literal_eval(answer[1])
            assert scene.start <= first and end == first + 4 < scene.end
    # One of four options, drawn at random.
    assert sum(guesses) / len(guesses) == pytest.approx(0.25, abs=0.1)


def test_windows_report_what_they_show(videos):
    by_path = {video_.path: video_ for video_ in videos}
    demonstrations = windows(videos, TextSettings())
    assert len({d.id for d in demonstrations}) == len(demonstrations)
    for demonstration in demonstrations:
        assert demonstration.subagent
        (clip,) = demonstration.clips
        start, end = clip.times[0], clip.times[-1] + world.STEP
        assert end - start == world.STEP * len(clip.times) == world.WINDOW
        assert 0 <= start <= world.SECONDS - world.WINDOW
        scenes = by_path[clip.path].scenes
        visible = [time for time in clip.times if any(scene.shows(time) for scene in scenes)]
        (report,) = said(demonstration)
        assert (report == " nothing") == (not visible)
        if visible:
            assert f" from {visible[0]:g} to " in report
            assert report.endswith(f" to {visible[-1]:g}")


def test_captions_name_what_is_on_the_frame(videos):
    by_path = {video_.path: video_ for video_ in videos}
    captions = list(world_text.captions(videos, TextSettings()))
    for caption in captions:
        scenes = by_path[caption.video].scenes
        scene = next(s for s in scenes if s.start <= caption.time < s.end)
        words = [scene.colour]
        if scene.shows(caption.time):
            words.append(word_of(scene))
        assert caption.words == tuple(words)
    assert 0.5 <= sum(len(c.words) == 2 for c in captions) / len(captions) < 0.65


@pytest.mark.parametrize(("field", "value"), [("leak", -0.1), ("groups", 6), ("groups", 0)])
def test_impossible_settings_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field}.*{value}"):
        TextSettings(**{field: value})
