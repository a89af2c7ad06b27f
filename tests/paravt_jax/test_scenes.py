"""The scenes: what is asked can be seen, only with crops or many frames, and not be guessed."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.ndimage

from paravt_extras.scenes import ask, demonstrate, film, sprites, storyboard
from paravt_extras.scenes.storyboard import FPS, PLACES, Chapter, Moment, SceneVideo, Vehicle
from paravt_jax.data import video
from paravt_jax.data.frames import PixelRules, overview_indices, window_indices
from paravt_jax.method.accuracy import accuracy, overlap, read_range
from paravt_jax.method.records import Question, QuestionKind

SETTINGS = storyboard.SceneSettings(seed=5, videos=120, heldout=120)
VIDEOS = storyboard.plan_videos(SETTINGS)
ASKED = [(each, asked) for each in VIDEOS for asked in ask.questions(each, SETTINGS.seed)]
OLDEST, LATEST = VIDEOS[0], VIDEOS[-1]


def short_video(lines: int = 360, place: int = 0, count: int = 5) -> SceneVideo:
    """Six seconds at one place, with a moment from second 2 to second 4."""
    moment = Moment(2.0, 4.0, "OSLO", Vehicle("red", 47, "right"), count)
    chapter = Chapter(PLACES[place], 0.0, 6.0, 3, (moment,))
    return SceneVideo("train/0000", "train", lines, 6, 600, (chapter,))


def pictures(shown: SceneVideo) -> list[np.ndarray]:
    drawn = film.Film(shown)
    return [drawn.picture(n).astype(np.int16) for n in range(shown.frames)]


def frames_showing(shown: SceneVideo, moment: Moment, budget: int) -> int:
    """The number of frames of an overview that show the whole moment."""
    times = overview_indices(shown.frames, budget) / FPS
    return int(((times >= moment.start) & (times < moment.end)).sum())


# --- plans ---


def test_a_video_does_not_depend_on_the_number_of_videos():
    few = storyboard.plan_videos(dataclasses.replace(SETTINGS, videos=4, heldout=1))
    assert few == (*VIDEOS[:4], VIDEOS[SETTINGS.videos])
    assert storyboard.plan_video(dataclasses.replace(SETTINGS, seed=6), "train", 0) != OLDEST


def test_no_moment_is_in_four_frames_and_every_moment_is_in_64():
    for each in VIDEOS:
        for moment in each.moments:
            assert frames_showing(each, moment, 4) == 0
            assert frames_showing(each, moment, 64) >= 1
        # Not even a part of a vehicle is seen.
        few = overview_indices(each.frames, 4) / FPS
        visits = [moment.visit for moment in each.moments]
        assert not any(start <= time < end for start, end in visits for time in few)


def test_three_crops_of_sixteen_frames_show_every_moment():
    for each in VIDEOS:
        windows = [(n * each.seconds / 3, (n + 1) * each.seconds / 3) for n in range(3)]
        info = video.VideoInfo(
            each.frames, each.seconds, np.arange(each.frames) / FPS, each.width, each.lines
        )
        seen = [info.times[window_indices(info, *window, 1.0, 16)] for window in windows]
        for moment in each.moments:
            assert any(moment.start <= time < moment.end for time in np.concatenate(seen))


def test_nothing_is_shown_twice():
    for each in VIDEOS:
        words = [moment.word for moment in each.moments if moment.word]
        vehicles = [moment.vehicle for moment in each.moments if moment.vehicle]
        counts = [moment.animals for moment in each.moments if moment.animals]
        colours = [vehicle.colour for vehicle in vehicles]
        numbers = [vehicle.number for vehicle in vehicles]
        for values in (words, colours, numbers, counts):
            assert len(values) == 5 and len(set(values)) == 5


# --- pictures ---


@pytest.mark.parametrize("place", range(len(PLACES)))
@pytest.mark.parametrize("count", [2, 7])
def test_animals_can_be_counted(place, count):
    shown = short_video(place=place, count=count)
    frames = pictures(shown)
    changed = np.abs(frames[24] - frames[8]).max(-1) > 24
    # Clouds, clock, board and vehicle are higher up.
    below = changed[round(0.86 * shown.lines) :]
    labelled: Any = scipy.ndimage.label(scipy.ndimage.binary_closing(below, iterations=2))
    blobs, labels = labelled
    sizes = scipy.ndimage.sum(below, blobs, range(1, labels + 1))
    assert (np.asarray(sizes) > 100).sum() == count


def test_everything_comes_and_goes_when_the_moment_says():
    shown = short_video()
    frames = pictures(shown)
    board = [frame[30:80, 40:560] for frame in frames]
    middle = [frame[170:300] for frame in frames]
    lit = [bool((part == (16, 40, 92)).all(-1).any()) for part in board]
    assert lit == [2 <= n / FPS < 4 for n in range(48)]
    visited = [bool(np.abs(part - middle[0]).max() > 60) for part in middle]
    start, end = shown.moments[0].visit
    assert visited == [start <= n / FPS < end for n in range(48)]


@pytest.mark.parametrize("lines", [320, 720])
def test_a_file_shows_what_was_drawn(tmp_path, lines):
    shown = short_video(lines)
    film.encode(shown, tmp_path / "a.mp4")
    info = video.probe(tmp_path / "a.mp4")
    assert (info.frames, info.duration, info.height) == (48, 6.0, lines)
    decoded = video.read(tmp_path / "a.mp4", [0, 24, 47]).astype(int)
    drawn = pictures(shown)
    for n, frame in zip((0, 24, 47), decoded, strict=True):
        assert np.abs(frame - drawn[n]).mean() < 3


# --- questions ---


def one(matches: list[Any]) -> Any:
    (only,) = matches
    return only


def vehicle_of(moment: Moment) -> Vehicle:
    assert moment.vehicle is not None
    return moment.vehicle


def span_of(text: str) -> tuple[float, float]:
    span = read_range(text)
    assert span is not None
    return span


def shown_with(each: SceneVideo, word: str) -> Moment:
    return one([moment for moment in each.moments if moment.word == word])


def answers(each: SceneVideo, asked: ask.SceneQuestion) -> set[str] | tuple[float, float]:
    """The right options or the span, read from the video by what the sentence names."""
    text = asked.question.text
    words = re.findall(r"\b[A-Z]{4,}\b", text)
    colours = [colour for colour in storyboard.COLOURS if f" {colour} " in text]
    vehicles = [moment for moment in each.moments if moment.vehicle]
    if asked.family in ("word", "when vehicle"):
        moment = one([m for m in vehicles if vehicle_of(m).colour == colours[0]])
        return {moment.word} if asked.family == "word" else moment.visit
    if asked.family == "when number":
        return one([m.visit for m in vehicles if f" {vehicle_of(m).number} " in text])
    named = [shown_with(each, word) for word in words]
    if asked.family == "when word":
        return named[0].start, named[0].end
    if asked.family == "clock":
        clocks = {
            each.clock(named[0].start + n / FPS)
            for n in range(200)
            if named[0].start + n / FPS < named[0].end
        }
        return clocks & set(asked.question.options)
    return {
        "number": lambda: {str(vehicle_of(named[0]).number)},
        "colour": lambda: {vehicle_of(named[0]).colour},
        "count": lambda: {str(named[0].animals)},
        "order": lambda: {min(named, key=lambda moment: moment.start).word},
        "numbers": lambda: {", then ".join(str(vehicle_of(m).number) for m in named)},
        "colours": lambda: {", then ".join(vehicle_of(m).colour for m in named)},
        "sum": lambda: {str(sum(moment.animals for moment in named))},
    }[asked.family]()


def test_the_video_shows_the_answer_and_no_other_option():
    seen = set()
    for each, asked in ASKED:
        question = asked.question
        right = answers(each, asked)
        if question.kind is QuestionKind.TEMPORAL_GROUNDING:
            assert read_range(question.answer) == right
        else:
            options = dict(zip(ask.LETTERS, question.options, strict=False))
            assert len(set(question.options)) == len(question.options)
            assert {letter for letter, option in options.items() if option in right} == {
                question.answer
            }
            assert accuracy(question, question.answer) == 1
        seen.add((each.split, asked.family))
    assert {family for split, family in seen if split == "heldout"} == set(ask.FAMILIES)


def test_held_out_videos_are_asked_with_other_sentences_and_about_more():
    def sentences(split: str) -> set[str]:
        names = (
            r"\b[A-Z]{4,}\b|\d+|\b(?:"
            + "|".join(
                [*storyboard.COLOURS, *(p.vehicle for p in PLACES), *(p.animals for p in PLACES)]
            )
            + r")\b"
        )
        return {re.sub(names, "X", a.question.text) for v, a in ASKED if v.split == split}

    assert not sentences("train") & sentences("heldout")
    families = {
        split: {a.family for v, a in ASKED if v.split == split} for split in storyboard.SPLITS
    }
    assert families["heldout"] - families["train"] == {"colour", "colours", "when number"}


def rank(option: str, question: Question) -> int:
    """The place of an option in order of its numbers, or else of its letters."""

    def key(text: str) -> tuple:
        return [int(n) for n in re.findall(r"\d+", text)], text

    return sorted(question.options, key=key).index(option)


Rule = Callable[[int, Question], Any]

FEATURES: dict[str, Rule] = {
    "letter": lambda n, question: n,
    "text": lambda n, question: question.options[n],
    "rank": lambda n, question: rank(question.options[n], question),
    "length": lambda n, question: sorted(map(len, question.options)).index(
        len(question.options[n])
    ),
    "named first": lambda n, question: question.text.find(question.options[n]),
    "shared words": lambda n, question: sum(
        word in other for word in question.options[n].split(", then ") for other in question.options
    ),
}


@pytest.fixture(scope="module")
def many() -> dict[str, list[Question]]:
    """Some hundred questions of multiple choice of each family."""
    matches: dict[str, list[Question]] = collections.defaultdict(list)
    settings = storyboard.SceneSettings(seed=7, videos=4, heldout=500)
    for each in storyboard.plan_videos(settings)[settings.videos :]:
        for asked in ask.questions(each, settings.seed, count=len(ask.FAMILIES)):
            if asked.question.options:
                matches[asked.family].append(asked.question)
    return matches


def blind_accuracy(learned: list[Question], tested: list[Question], describe: Rule) -> float:
    """How often a rule from `learned` is right, without the video, about `tested`."""
    right: dict[Any, list[bool]] = collections.defaultdict(list)
    for question in learned:
        for n, letter in zip(range(len(question.options)), ask.LETTERS, strict=False):
            right[describe(n, question)].append(letter == question.answer)
    # Values that were hardly met count as chance.
    chance = 1 / len(learned[0].options)
    worth = {value: (sum(met) + 8 * chance) / (len(met) + 8) for value, met in right.items()}

    def guess(question: Question) -> str:
        values = [worth.get(describe(n, question), chance) for n in range(len(question.options))]
        return ask.LETTERS[values.index(max(values))]

    return float(np.mean([guess(question) == question.answer for question in tested]))


@pytest.mark.parametrize("feature", FEATURES)
def test_no_rule_about_the_options_beats_chance(feature, many):
    assert len(many) == 9
    for family, asked in many.items():
        one, other = asked[::2], asked[1::2]
        rule = FEATURES[feature]
        accuracy = (blind_accuracy(one, other, rule) + blind_accuracy(other, one, rule)) / 2
        chance = 1 / len(asked[0].options)
        spread = math.sqrt(chance * (1 - chance) / len(asked))
        assert accuracy < chance + 3.5 * spread, family


def test_a_constant_span_grounds_nothing():
    spans = [
        span_of(asked.question.answer)
        for _, asked in ASKED
        if asked.question.kind is QuestionKind.TEMPORAL_GROUNDING
    ]
    best = max(
        np.mean([overlap((start, start + length), span) for span in spans])
        for start in range(0, 240, 10)
        for length in (5, 10, 20, 40, 80)
    )
    assert len(spans) > 200 and best < 0.05


def test_evaluations_take_the_same_frames_for_showing_the_answer():
    for each, asked in ASKED[::10]:
        evidence = asked.question.evidence
        assert (evidence is None) == (len(asked.moments) == 2)
        if evidence is None:
            continue
        first, last = evidence
        for budget in (4, 8, 16, 32, 64):
            times = overview_indices(each.frames, budget) / FPS
            shown = any(first <= time <= last for time in times)
            assert shown == (frames_showing(each, asked.moments[0], budget) > 0)


def test_what_is_to_be_read_is_large_enough_at_the_pixels_of_the_recipes():
    heights = (sprites.WORD_HEIGHT, sprites.NUMBER_HEIGHT, sprites.TIME_HEIGHT)
    for lines in (320, 360, 720):
        shown = short_video(lines)
        height, _ = PixelRules().size(shown.lines, shown.width)
        # A patch of the vision tower has 16 pixels.
        assert height * min(*heights, sprites.ANIMAL_HEIGHT, sprites.VEHICLE_HEIGHT) >= 16


# --- demonstrations ---


DEMONSTRATED = [
    (each, conversation)
    for each in VIDEOS
    if each.demonstrated
    for conversation in demonstrate.demonstrations(each, SETTINGS.seed)
]


def texts(conversation: list, role: str) -> list[str]:
    return [m["content"][-1]["text"] for m in conversation if m["role"] == role]


def test_most_demonstrations_look_and_some_guess_or_see_it_at_once():
    calls = collections.Counter(
        text.count("<tool_call>")
        for _, conversation in DEMONSTRATED
        for text in texts(conversation, "assistant")[:1]
    )
    assert set(calls) == {0, 1, 2, 3}
    assert 0.5 < 1 - calls[0] / calls.total() < 0.7
    thoughts = [texts(conversation, "assistant")[0] for _, conversation in DEMONSTRATED]
    assert sum("I can only guess" in thought for thought in thoughts) > 20
    assert sum("answers the question" in thought for thought in thoughts) > 20


def test_a_demonstration_that_looked_answers_from_its_last_reports():
    hits = []
    for _, conversation in DEMONSTRATED:
        if not texts(conversation, "tool"):
            continue
        thought, answer = texts(conversation, "assistant")[-1].split("</think>")
        assert answer.strip().startswith("<answer>")
        reports = " ".join(texts(conversation, "tool"))
        for word in re.findall(r"\b[A-Z]{4,}\b", thought.split("So it is")[0]):
            assert word in reports
        hits.append(thought)
    assert len(hits) > 100
