"""Writes demonstrations for a cold start, as conversations in the published layout.

They show an overview of `FRAMES` frames, which shows no moment: prepare them with
`--data.frames 4`. Three kinds of them leave something to learn:

- Most look closer: they crop every part of the video where the answer can be, in one turn. For a
  span of time, a second turn crops what the first one found. Reports say what the frames of a crop
  show, and nothing else.
- Some do not look, say that the frames do not show it, and answer at random.
- Some are asked where the video begins or ends, which the frames show, and just answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from paravt_extras.published_format import (
    SYSTEM_WITH_TOOL,
    Message,
    call,
    conclude,
    say,
    show,
    think,
    with_options,
)
from paravt_extras.scenes.ask import LETTERS, SceneQuestion, names, questions
from paravt_extras.scenes.storyboard import FPS, PLACES, Chapter, Moment, SceneVideo
from paravt_jax.data.frames import VideoInfo, overview_indices, window_indices
from paravt_jax.method.records import QuestionKind

FRAMES = 4
"""Overview frames of a demonstration."""
CROP_FRAMES = 16
"""Frames of a crop, at most one per second: the defaults of the protocol."""

_LOOKING = 0.6
_GUESSING = 0.2
_AROUND = 4  # seconds of a close look before and after what was found
# Families that name a vehicle by its colour, and those that name what is at one place only.
_VEHICLE_NAMED = ("word", "when vehicle")
_PLACE_NAMED = (*_VEHICLE_NAMED, "number", "count")
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

Window = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class _Glimpse:
    """A moment as some frames of a crop show it; times in seconds."""

    moment: Moment
    times: tuple[float, ...]


def demonstrations(video: SceneVideo, seed: int) -> list[list[Message]]:
    """Write the demonstrations of a video, one per question that could be asked about it."""
    rng = np.random.default_rng([seed, 3, int(video.id.split("/")[1])])
    conversations = []
    for asked in questions(video, seed):
        draw = rng.random()
        if draw < _LOOKING:
            conversations.append(_look(video, asked, rng))
        elif draw < _LOOKING + _GUESSING:
            conversations.append(_guess(video, asked, rng))
        else:
            conversations.append(_answer_at_once(video, rng))
    return conversations


# --- looking ---


def _look(video: SceneVideo, asked: SceneQuestion, rng: np.random.Generator) -> list[Message]:
    windows = _windows(video, asked)
    parts = "this part" if len(windows) == 1 else f"these {_NUMBERS[len(windows)]} parts"
    thought = f"{_unanswered(video, asked)} It can be in {parts} of the video, so I look closer."
    turns = [*_asked(video, asked), *_crops(video, thought, windows)]
    sightings = [sighting for window in windows for sighting in _sightings(video, window)]
    seen = [next(s for s in sightings if s.moment is moment) for moment in asked.moments]
    if asked.question.kind is QuestionKind.TEMPORAL_GROUNDING:
        return [*turns, *_look_closer(video, seen[0])]
    thought = " ".join(f"{_described(video, sighting)}." for sighting in seen)
    option = asked.question.options[LETTERS.index(asked.question.answer)]
    return [
        *turns,
        say("assistant", conclude(f"{thought} So it is {option}.", asked.question.answer)),
    ]


def _look_closer(video: SceneVideo, seen: _Glimpse) -> list[Message]:
    """Crop around what was found, at one frame per second, and answer with its span."""
    start = max(0.0, np.floor(seen.times[0]) - _AROUND)
    end = min(float(video.seconds), np.ceil(seen.times[-1]) + _AROUND)
    thought = f"It is there at {seen.times[0]:g} seconds. I look closer for the exact times."
    window = (float(start), float(end))
    (closer,) = (s for s in _sightings(video, window) if s.moment is seen.moment)
    # At one frame per second, it is gone a second after the last frame that shows it.
    answer = f"[{closer.times[0]:g}, {closer.times[-1] + 1:g}]"
    thought_after = (
        f"The first frame with it is at {closer.times[0]:g} seconds, "
        f"and the last one at {closer.times[-1]:g} seconds."
    )
    return [
        *_crops(video, thought, (window,)),
        say("assistant", conclude(thought_after, answer)),
    ]


def _windows(video: SceneVideo, asked: SceneQuestion) -> list[Window]:
    """Return the gaps between overview frames in which the moments can be, judged by these frames.

    A vehicle or animals are at their own place. If no frame shows it, it is between two others.
    """
    frames = _overview_times(video)
    gaps = list(zip(frames, frames[1:], strict=False))
    if asked.family in _PLACE_NAMED:
        chapter = video.chapter_of(asked.moments[0])
        ends = [(_chapter_at(video, start), _chapter_at(video, end)) for start, end in gaps]
        likely = [gap for gap, around in zip(gaps, ends, strict=True) if chapter in around]
        between = [gap for gap, (a, b) in zip(gaps, ends, strict=True) if a is not b]
        gaps = likely or between
    # The last frame is shown a little before the end.
    return [
        (np.floor(start).item(), min(np.ceil(end).item(), float(video.seconds)))
        for start, end in gaps
    ]


def _crops(video: SceneVideo, thought: str, windows: Sequence[Window]) -> list[Message]:
    """Return one turn with a call per window, and their reports."""
    calls = "\n".join(call(video.path, start, end) for start, end in windows)
    return [
        say("assistant", f"{think(thought)}{calls}"),
        *(say("tool", report(video, window)) for window in windows),
    ]


def report(video: SceneVideo, window: Window) -> str:
    """Return what a sub-agent says about a window: what its frames show, with times."""
    sightings = _sightings(video, window)
    if not sightings:
        return "The board is dark, and no vehicle and no animals are there."
    return " ".join(f"{_described(video, sighting)}." for sighting in sightings)


def _sightings(video: SceneVideo, window: Window) -> list[_Glimpse]:
    times = np.arange(video.frames) / FPS
    info = VideoInfo(video.frames, float(video.seconds), times, video.width, video.lines)
    shown = times[window_indices(info, *window, 1.0, CROP_FRAMES)].tolist()
    sightings = []
    for moment in video.moments:
        within = tuple(round(time, 1) for time in shown if moment.start <= time < moment.end)
        if within:
            sightings.append(_Glimpse(moment, within))
    return sightings


def _described(video: SceneVideo, sighting: _Glimpse) -> str:
    moment = sighting.moment
    named = names(video, moment)
    clauses = []
    if moment.word:
        clauses.append(f"the board shows {moment.word}")
    if moment.vehicle is not None:
        look = "{colour} {vehicle} with the number {number}".format(**named)
        clauses.append(f"{'an' if look[0] == 'o' else 'a'} {look} is there")
    if moment.animals:
        clauses.append(f"there are {_NUMBERS[moment.animals]} {named['animals']}")
    first, last = sighting.times[0], sighting.times[-1]
    when = f"At {first:g} seconds" if first == last else f"From {first:g} to {last:g} seconds"
    clocks = dict.fromkeys(video.clock(time) for time in (first, last))
    return f"{when} {', '.join(clauses)}, and the clock shows {' to '.join(clocks)}"


# --- not looking ---


def _guess(video: SceneVideo, asked: SceneQuestion, rng: np.random.Generator) -> list[Message]:
    thought = f"{_unanswered(video, asked)} I can only guess."
    question = asked.question
    if question.kind is QuestionKind.MULTIPLE_CHOICE:
        answer = LETTERS[int(rng.integers(len(question.options)))]
    else:
        start = int(rng.integers(video.seconds - 6))
        answer = f"[{start}, {start + 6}]"
    return [*_asked(video, asked), say("assistant", conclude(thought, answer))]


def _answer_at_once(video: SceneVideo, rng: np.random.Generator) -> list[Message]:
    """Return a question about the first or the last frame, which every overview shows."""
    at_end = bool(rng.integers(2))
    chapter = video.chapters[-1 if at_end else 0]
    others = [place.where for place in PLACES if place is not chapter.place]
    wrong = [others[n] for n in rng.permutation(len(others))[:3]]
    options = [*wrong]
    options.insert(int(rng.integers(4)), chapter.place.where)
    text = "Where does the video end?" if at_end else "Where does the video begin?"
    which = "last" if at_end else "first"
    thought = f"{_overview(video)} The {which} one answers the question."
    return [
        say("system", SYSTEM_WITH_TOOL),
        say("user", show(video.path), with_options(text, options)),
        say("assistant", conclude(thought, LETTERS[options.index(chapter.place.where)])),
    ]


# --- the overview ---


def _asked(video: SceneVideo, asked: SceneQuestion) -> list[Message]:
    question = asked.question
    text = with_options(question.text, question.options)
    return [say("system", SYSTEM_WITH_TOOL), say("user", show(video.path), text)]


def _overview_times(video: SceneVideo) -> list[float]:
    return (overview_indices(video.frames, FRAMES) / FPS).tolist()


def _chapter_at(video: SceneVideo, time: float) -> Chapter:
    return next(chapter for chapter in video.chapters if time < chapter.end)


def _overview(video: SceneVideo) -> str:
    """Return where each frame of the overview was taken."""
    shown = [(time, _chapter_at(video, time).place.name) for time in _overview_times(video)]
    return (
        f"The frames show a {', a '.join(f'{name} at {time:.1f}' for time, name in shown)} seconds."
    )


def _unanswered(video: SceneVideo, asked: SceneQuestion) -> str:
    """Return the overview, and that it does not show what the question is about."""
    first, last = asked.moments[0], asked.moments[-1]
    sought = " or ".join(dict.fromkeys((first.word, last.word))) + " on the board"
    if asked.family in _VEHICLE_NAMED:
        sought = "the {colour} {vehicle}".format(**names(video, first))
    return f"{_overview(video)} None of them shows {sought}."
