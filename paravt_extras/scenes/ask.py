"""Asks about a planned video: multiple choice and temporal grounding, in plain English.

Every question is about one moment or two. Its wrong options are what other moments of the same
video show. Right and wrong options are drawn alike, so that neither words nor numbers nor letters
tell which one is right: a guess without the video is right as often as chance.

Held-out videos are asked with other sentences, and about three more things.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paravt_extras.scenes.storyboard import FPS, Moment, SceneVideo
from paravt_jax.method.records import Question, QuestionKind

LETTERS = "ABCD"
QUESTIONS_PER_VIDEO = 8

_SPAN = "Give the start and the end in seconds."


@dataclasses.dataclass(frozen=True)
class QuestionFamily:
    """Questions that differ only in names.

    Attributes:
        training: Their sentences in training; empty if they are held out.
        heldout: Their sentence in held-out videos.
    """

    training: tuple[str, ...]
    heldout: str


FAMILIES = {
    # One moment.
    "word": QuestionFamily(
        (
            "Which word does the board show while the {colour} {vehicle} is there?",
            "The {colour} {vehicle} stops. What does the board say at that time?",
        ),
        "What can be read on the board during the stop of the {colour} {vehicle}?",
    ),
    "number": QuestionFamily(
        (
            "What is the number on the {vehicle} that is there while the board shows {word}?",
            "While the board shows {word}, a {vehicle} is in view. Which number does it carry?",
        ),
        "Look at the {vehicle} when the board reads {word}. What number is painted on it?",
    ),
    "count": QuestionFamily(
        (
            "How many {animals} are there while the board shows {word}?",
            "Count the {animals} at the time when the board shows {word}. How many are there?",
        ),
        "The board reads {word}. How many {animals} are in the picture then?",
    ),
    "clock": QuestionFamily(
        (
            "Which of these times does the clock show while the board shows {word}?",
            "The board shows {word}. What time is it on the clock then?",
        ),
        "At which of these times on the clock can {word} be read on the board?",
    ),
    "colour": QuestionFamily(
        (),
        "What colour is the {vehicle} that is there while the board shows {word}?",
    ),
    # Two moments.
    "order": QuestionFamily(
        (
            "The board shows {first} and, at another time, {second}. Which of them comes first?",
            "Which of the two words does the board show earlier, {first} or {second}?",
        ),
        "Of the words {first} and {second}, which one is on the board before the other?",
    ),
    "numbers": QuestionFamily(
        (
            "Which numbers are on the vehicles that are there while the board shows {first} and "
            "while it shows {second}, in this order?",
            "One vehicle is there while the board shows {first}, another one while it shows "
            "{second}. Which numbers do they carry, in this order?",
        ),
        "Name the numbers of two vehicles: first the one that is there when the board reads "
        "{first}, then the one that is there when it reads {second}.",
    ),
    "sum": QuestionFamily(
        (
            "How many animals are there in all, if those that are there while the board shows "
            "{first} and those that are there while it shows {second} are added?",
            "Count the animals while the board shows {first} and again while it shows {second}. "
            "What is the sum?",
        ),
        "Add up the animals of two times: when the board reads {first} and when it reads {second}.",
    ),
    "colours": QuestionFamily(
        (),
        "Which colours have the vehicles that are there when the board reads {first} and when it "
        "reads {second}, in this order?",
    ),
    # Temporal grounding.
    "when word": QuestionFamily(
        (
            f"When does the board show {{word}}? {_SPAN}",
            f"From when to when can {{word}} be read on the board? {_SPAN}",
        ),
        f"During which time is the word {{word}} on the board? {_SPAN}",
    ),
    "when vehicle": QuestionFamily(
        (
            f"When is the {{colour}} {{vehicle}} in view? {_SPAN}",
            f"From when to when can the {{colour}} {{vehicle}} be seen? {_SPAN}",
        ),
        f"During which time is the {{colour}} {{vehicle}} in the picture? {_SPAN}",
    ),
    "when number": QuestionFamily(
        (),
        f"During which time is the {{vehicle}} with the number {{number}} in the picture? {_SPAN}",
    ),
}


@dataclasses.dataclass(frozen=True)
class SceneQuestion:
    """A question with what it is about.

    Attributes:
        question: The question. The answer of multiple choice is a letter.
        family: Its key in `FAMILIES`.
        moments: The moments that have to be seen.
    """

    question: Question
    family: str
    moments: tuple[Moment, ...]


@dataclasses.dataclass(frozen=True)
class _Draft:
    """A question before it is worded.

    Attributes:
        names: What its sentence names, by placeholder.
        moments: The moments that have to be seen.
        options: The right option, and then the wrong ones; empty for grounding.
        span: The answer of grounding, in seconds.
    """

    names: dict[str, str]
    moments: tuple[Moment, ...]
    options: tuple[str, ...] = ()
    span: tuple[float, float] | None = None


def questions(
    video: SceneVideo, seed: int, count: int = QUESTIONS_PER_VIDEO
) -> tuple[SceneQuestion, ...]:
    """Ask about a video, with at most one question of each family.

    Args:
        video: The video.
        seed: Seed of the world.
        count: Upper bound on the number of questions.
    """
    heldout = video.split == "heldout"
    rng = np.random.default_rng([seed, 2, heldout, int(video.id.split("/")[1])])
    possible = [name for name, family in FAMILIES.items() if heldout or family.training]
    chosen = [possible[n] for n in rng.permutation(len(possible))[:count]]
    # Each letter is right equally often, as nearly as the number of questions allows.
    places = {size: _balanced_places(size, count, rng) for size in (2, 4)}
    asked = []
    for name in chosen:
        ask, about = _MAKERS[name]
        draft = ask(video, rng, *about)
        place = places[len(draft.options)].pop() if draft.options else 0
        asked.append(_worded(video, name, draft, place, rng))
    return tuple(asked)


def _balanced_places(size: int, count: int, rng: np.random.Generator) -> list[int]:
    rounds = [rng.permutation(size).tolist() for _ in range(count)]
    return list(itertools.chain.from_iterable(rounds))


def _worded(
    video: SceneVideo, name: str, draft: _Draft, place: int, rng: np.random.Generator
) -> SceneQuestion:
    """Write a question, with its right option at a place."""
    family = FAMILIES[name]
    sentences = (family.heldout,) if video.split == "heldout" else family.training
    text = sentences[int(rng.integers(len(sentences)))].format(**draft.names)
    # A question has one span of evidence or none, and half of it would not be enough to answer.
    only = draft.moments[0] if len(draft.moments) == 1 else None
    evidence = None if only is None else (only.start, only.end - 1 / FPS)
    id = f"{video.id}/{name.replace(' ', '-')}"
    options = []
    if draft.span is not None:
        kind = QuestionKind.TEMPORAL_GROUNDING
        answer = f"[{draft.span[0]:g}, {draft.span[1]:g}]"
    else:
        kind, answer = QuestionKind.MULTIPLE_CHOICE, LETTERS[place]
        right, *wrong = draft.options
        options = [wrong[n] for n in rng.permutation(len(wrong))]
        options.insert(place, right)
    question = Question(id, video.path, text, kind, answer, tuple(options), evidence=evidence)
    return SceneQuestion(question, name, draft.moments)


# --- what is asked ---


def _with_parts(video: SceneVideo, *parts: str) -> list[Moment]:
    """Return the moments that have some parts."""
    return [moment for moment in video.moments if all(getattr(moment, part) for part in parts)]


def _drawn(moments: Sequence[Moment], count: int, rng: np.random.Generator) -> tuple[Moment, ...]:
    return tuple(moments[n] for n in rng.permutation(len(moments))[:count])


def names(video: SceneVideo, moment: Moment) -> dict[str, str]:
    """Return what sentences and options may name of a moment."""
    place = video.chapter_of(moment).place
    named = {
        "word": moment.word,
        "vehicle": place.vehicle,
        "animals": place.animals,
        "count": str(moment.animals),
        "clock": video.clock((moment.start + moment.end) / 2),
    }
    if moment.vehicle is not None:
        named |= {"colour": moment.vehicle.colour, "number": str(moment.vehicle.number)}
    return named


def _shown_by(
    video: SceneVideo,
    rng: np.random.Generator,
    parts: Sequence[str],
    name: str,
) -> _Draft:
    """Return what one moment shows; the wrong options are shown by other moments.

    Args:
        video: The video.
        rng: Source of the choices.
        parts: Parts of the moment. The last one is what is asked about.
        name: What an option names of its moment.
    """
    (moment,) = _drawn(_with_parts(video, *parts), 1, rng)
    others = [other for other in _with_parts(video, parts[-1]) if other is not moment]
    shown = (moment, *_drawn(others, 3, rng))
    options = tuple(names(video, each)[name] for each in shown)
    return _Draft(names(video, moment), (moment,), options)


def _ask_order(video: SceneVideo, rng: np.random.Generator) -> _Draft:
    first, second = _drawn(_with_parts(video, "word"), 2, rng)
    right, wrong = sorted((first, second), key=lambda moment: moment.start)
    named = {"first": first.word, "second": second.word}
    return _Draft(named, (right, wrong), (right.word, wrong.word))


def _in_order(video: SceneVideo, rng: np.random.Generator, name: str) -> _Draft:
    """Return what two vehicles show. The options combine two values of each, so that all occur
    alike."""
    first, second = _drawn(_with_parts(video, "word", "vehicle"), 2, rng)
    others = [each for each in _with_parts(video, "vehicle") if each not in (first, second)]
    instead, after = _drawn(others, 2, rng)
    pairs = ((first, second), (first, after), (instead, second), (instead, after))
    named = {"first": first.word, "second": second.word}
    options = tuple(", then ".join(names(video, moment)[name] for moment in pair) for pair in pairs)
    return _Draft(named, (first, second), options)


def _ask_sum(video: SceneVideo, rng: np.random.Generator) -> _Draft:
    """Return the sum of two counts. Four sums are drawn first, and then which of them is asked for.

    If a pair of moments were drawn, middle sums would be right more often than others.
    """
    counted = _with_parts(video, "word", "animals")
    by_sum: dict[int, list[tuple[Moment, Moment]]] = {}
    for pair in itertools.combinations(counted, 2):
        by_sum.setdefault(sum(moment.animals for moment in pair), []).append(pair)
    sums = sorted(by_sum)
    right, *wrong = (sums[n] for n in rng.permutation(len(sums))[:4])
    pairs = by_sum[right]
    first, second = _drawn(pairs[int(rng.integers(len(pairs)))], 2, rng)
    named = {"first": first.word, "second": second.word}
    return _Draft(named, (first, second), tuple(map(str, (right, *wrong))))


def _ask_when(video: SceneVideo, rng: np.random.Generator, part: str) -> _Draft:
    (moment,) = _drawn(_with_parts(video, part), 1, rng)
    span = moment.visit if part == "vehicle" else (moment.start, moment.end)
    return _Draft(names(video, moment), (moment,), span=span)


# How each family is asked, and with what.
_MAKERS: dict[str, tuple[Callable[..., _Draft], tuple[Any, ...]]] = {
    "word": (_shown_by, (("vehicle", "word"), "word")),
    "number": (_shown_by, (("word", "vehicle"), "number")),
    "count": (_shown_by, (("word", "animals"), "count")),
    # The board is in all places, so the question does not tell in which part of the video to look.
    "clock": (_shown_by, (("word",), "clock")),
    "colour": (_shown_by, (("word", "vehicle"), "colour")),
    "order": (_ask_order, ()),
    "numbers": (_in_order, ("number",)),
    "sum": (_ask_sum, ()),
    "colours": (_in_order, ("colour",)),
    "when word": (_ask_when, ("word",)),
    "when vehicle": (_ask_when, ("vehicle",)),
    "when number": (_ask_when, ("vehicle",)),
}
