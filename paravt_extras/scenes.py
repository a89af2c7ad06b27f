"""Writes videos of minutes at real pixels, with questions and demonstrations for a real model.

The same command continues an interrupted one, and does nothing once all is there.

    FOLDER/settings.json             the settings, so that a folder never mixes two worlds
    FOLDER/media/train/0000.mp4      videos to train on; every fourth is for demonstrations
    FOLDER/media/heldout/0000.mp4    videos to evaluate on
    FOLDER/annotations/*.parquet     questions to train on and demonstrations, as published
    FOLDER/train.jsonl               the same questions as a file of your own questions
    FOLDER/heldout.jsonl             questions about the videos to evaluate on

The background has three colours, one after the other. At each of six moments, a card shows a
coloured shape with a number, and a word below it:

    seconds     0                     T/3                   2T/3                    T
    background  |     pink      |                grey              |      olive     |
    moments     |    ##    ##   |   ##            ##          ##   |      ##        |
    K = 4       *                      *                     *                      *

A moment lasts more than the time between two overview frames at K = 64, so that an overview of 64
frames shows all of them. It avoids the four frames of K = 4: these show only backgrounds.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import pathlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import av
import numpy as np
import tyro
from PIL import Image, ImageChops, ImageDraw, ImageFont
from tqdm import tqdm

from paravt_extras import published_format
from paravt_extras.published_format import Message, call, conclude, say, show, think, with_options
from paravt_jax.data.any_path import require_local
from paravt_jax.data.frames import VideoInfo, overview_indices, window_indices
from paravt_jax.data.stored import lock, naming_full_disk, require_same, write_atomically
from paravt_jax.method.records import Question, QuestionKind
from paravt_jax.processes.cluster import run_command
from paravt_jax.processes.exit_codes import Stopped
from paravt_jax.processes.interrupts import Interrupts

SPLITS = ("train", "heldout")
FPS = 4
"""Frames per second of a video."""
MEDIA = "media"
ANNOTATIONS = "annotations"


@dataclasses.dataclass(frozen=True)
class SceneSettings:
    """Number and size of the videos. `write_scenes` checks them."""

    seed: int = 0
    """Seed of videos and questions."""
    videos: int = 200
    """Videos to train on; every fourth is for demonstrations."""
    heldout: int = 60
    """Videos to evaluate on."""
    lines: Literal[320, 360, 720] = 360
    """Height of a frame in pixels."""


# --- what happens ---

# Colours have the names that Pillow draws.
BACKGROUNDS = ("pink", "grey", "tan", "turquoise", "olive")
COLOURS = ("red", "yellow", "green", "blue", "purple", "black")
# Number of corners, and degrees by which the shape is turned.
SHAPES = {"circle": (90, 0), "triangle": (3, 0), "square": (4, 0), "diamond": (4, 45)}
_WORDS = (
    "ACCRA BASEL BERN BONN CAIRO CORK DAKAR DELHI DUBAI GENOA HANOI KYIV LIMA LYON MIAMI MILAN "
    "MINSK OSLO PARIS PERTH PORTO QUITO RIGA ROME SEOUL SOFIA TOKYO TUNIS TURIN VADUZ"
).split()
_MOMENTS = 6
# Length of a moment in units of the time between two overview frames at K = 64.
_LENGTHS = (1.4, 2.2)
_LEAST_SECONDS = 2.5
_ROOM = 1.0  # seconds between moments, and between a moment and what it avoids


@dataclasses.dataclass(frozen=True)
class Moment:
    """Some seconds in which a card is shown.

    Attributes:
        start: Second of the first frame with the card.
        end: Second of the first frame without it.
        left: Place of the card, from 0 (left) to 1 (right).
        colour: Colour of the shape.
        shape: Its name.
        number: The number on it.
        word: The word below it.
    """

    start: float
    end: float
    left: float
    colour: str
    shape: str
    number: int
    word: str


@dataclasses.dataclass(frozen=True)
class SceneVideo:
    """One video.

    Attributes:
        split: `train` or `heldout`.
        number: Its place in the split.
        lines: Height of a frame in pixels.
        seconds: Its length.
        chapters: The second at which each background begins, and its colour.
        moments: The moments in order. Their colours, numbers and words all differ.
    """

    split: str
    number: int
    lines: int
    seconds: int
    chapters: tuple[tuple[int, str], ...]
    moments: tuple[Moment, ...]

    @property
    def path(self) -> str:
        """Path of its file below `MEDIA`."""
        return f"{self.split}/{self.number:04d}.mp4"

    @property
    def info(self) -> VideoInfo:
        """What its file contains. The width is about 16/9 of the height."""
        times = np.arange(self.seconds * FPS) / FPS
        width = round(self.lines * 16 / 9 / 32) * 32
        return VideoInfo(len(times), float(self.seconds), times, width, self.lines)

    @property
    def demonstrated(self) -> bool:
        """Whether demonstrations show this video. Then no question is asked about it."""
        return self.split == "train" and self.number % 4 == 3

    def background(self, time: float) -> str:
        return next(colour for start, colour in reversed(self.chapters) if start <= time)


def plan_videos(settings: SceneSettings) -> tuple[SceneVideo, ...]:
    """Return all videos, those to train on first. None depends on the number of videos."""
    counts = {"train": settings.videos, "heldout": settings.heldout}
    return tuple(_plan(settings, split, n) for split in SPLITS for n in range(counts[split]))


def _plan(settings: SceneSettings, split: str, number: int) -> SceneVideo:
    rng = np.random.default_rng([settings.seed, SPLITS.index(split), number])
    seconds = int(rng.integers(90, 241))
    overview = (overview_indices(seconds * FPS, 4) / FPS).tolist()
    # The background changes before the second and after the third of the four frames.
    cuts = (rng.uniform((0.2, 0.7), (0.3, 0.8)) * seconds).astype(int).tolist()
    chapters = tuple(zip((0, *cuts), rng.permutation(BACKGROUNDS).tolist(), strict=False))
    avoided = [(time, time) for time in (*overview, *cuts)]
    spans: list[tuple[float, float]] = []
    while len(spans) < _MOMENTS:
        length = max(_LEAST_SECONDS, rng.uniform(*_LENGTHS) * seconds / 63)
        start = int(rng.integers(seconds * FPS)) / FPS
        end = start + math.ceil(length * FPS) / FPS
        if all(end + _ROOM <= first or last + _ROOM <= start for first, last in avoided + spans):
            spans.append((start, end))
    left = rng.random(_MOMENTS).tolist()
    colours, words = rng.permutation(COLOURS).tolist(), rng.permutation(_WORDS).tolist()
    shapes = rng.choice([*SHAPES], _MOMENTS).tolist()
    numbers = rng.permutation(np.arange(12, 99)).tolist()
    moments = tuple(
        Moment(*span, *shown)
        for span, *shown in zip(sorted(spans), left, colours, shapes, numbers, words, strict=False)
    )
    return SceneVideo(split, number, settings.lines, seconds, chapters, moments)


# --- what it looks like ---

# x264 at constant quality and with one thread writes the same bytes every time.
_ENCODER = {"qp": "20", "preset": "superfast", "threads": "1", "bf": "0"}
_DRIFT = 0.01  # heights of a frame by which the background moves per second


def _draw_video(video: SceneVideo, file: pathlib.Path) -> None:
    """Write a video as H.264. The file appears when it is complete; its folder must exist."""
    backgrounds = {colour: _draw_background(video, colour) for _, colour in video.chapters}
    cards = {moment: _draw_card(moment, video.lines) for moment in video.moments}
    info = video.info
    unfinished = file.with_suffix(".tmp")
    with av.open(str(unfinished), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FPS, options=_ENCODER)
        stream.width, stream.height, stream.pix_fmt = info.width, info.height, "yuv420p"
        stream.gop_size = 4 * FPS
        frame = shown = None
        for number, time in enumerate(info.times.tolist()):
            moment = next((m for m in video.moments if m.start <= time < m.end), None)
            # The background moves once per second, so most frames are alike.
            if frame is None or shown != (int(time), moment):
                shown = int(time), moment
                way = round(_DRIFT * int(time) * video.lines)
                picture = ImageChops.offset(backgrounds[video.background(time)], way, 0)
                if moment is not None:
                    card = cards[moment]
                    left = round(moment.left * (info.width - card.width))
                    picture.paste(card, (left, (info.height - card.height) // 2), card)
                frame = av.VideoFrame.from_image(picture).reformat(format="yuv420p", threads=1)
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    os.replace(unfinished, file)


# Pictures are drawn at twice their size, which smooths all edges.


def _draw_background(video: SceneVideo, colour: str) -> Image.Image:
    """Draw lighter discs. The right edge continues at the left one."""
    width, height = 2 * video.info.width, 2 * video.lines
    rng = np.random.default_rng([video.number, BACKGROUNDS.index(colour)])
    picture = Image.new("RGB", (width, height), colour)
    draw = ImageDraw.Draw(picture, "RGBA")
    for x, y, radius in rng.uniform((0, 0, 0.05 * height), (width, height, 0.2 * height), (12, 3)):
        for wrapped in (x - width, x, x + width):
            draw.circle((wrapped, y), radius, (255, 255, 255, 40))
    return picture.reduce(2)


def _draw_card(moment: Moment, lines: int) -> Image.Image:
    unit = 2 * lines
    size = round(0.84 * lines) * 2
    card = Image.new("RGBA", (size, size))
    draw = ImageDraw.Draw(card)
    draw.rounded_rectangle((0, 0, size - 1, size - 1), 0.06 * unit, "white")
    middle = (size / 2, 0.33 * unit)
    draw.regular_polygon((*middle, 0.28 * unit), *SHAPES[moment.shape], moment.colour)
    for at, text, fill, height in (
        (middle, str(moment.number), "black" if moment.colour == "yellow" else "white", 0.18),
        ((size / 2, 0.71 * unit), moment.word, "black", 0.19),
    ):
        font = ImageFont.load_default(height * unit)
        draw.text(at, text, fill, font, anchor="mm", stroke_width=0.006 * unit)
    return card.reduce(2)


# --- what is asked ---

FAMILIES = ("word", "number", "numbers", "order", "sum", "when", "end")
_LETTERS = "ABCDE"


def questions(video: SceneVideo, seed: int) -> list[tuple[Question, tuple[Moment, ...]]]:
    """Ask one question of each family, with the moments that have to be seen.

    The wrong options are what other moments of the same video show, and all are drawn alike: a
    guess without the video is right as often as chance.
    """
    rng = np.random.default_rng([seed, 2, SPLITS.index(video.split), video.number])
    asked = []
    for family in FAMILIES:
        drawn = [video.moments[n] for n in rng.permutation(_MOMENTS)[:4]]
        looks, text, answer, *wrong = _draft(family, video, drawn)
        kind = QuestionKind.TEMPORAL_GROUNDING if family == "when" else QuestionKind.OPEN_ENDED
        options = rng.permutation([answer, *wrong]).tolist() if wrong else []
        if options:
            kind, answer = QuestionKind.MULTIPLE_CHOICE, _LETTERS[options.index(answer)]
        # A question has one span of evidence or none, and half of it would not be enough to answer.
        evidence = (drawn[0].start, drawn[0].end - 1 / FPS) if looks == 1 else None
        id = f"{video.path}/{family}"
        question = Question(id, video.path, text, kind, answer, (*options,), (), evidence)
        asked.append((question, tuple(drawn[:looks])))
    return asked


def _draft(family: str, video: SceneVideo, drawn: Sequence[Moment]) -> tuple[Any, ...]:
    """Return how many of four moments have to be seen, the question, the answer, and wrong answers
    if there are options."""
    a, b, c, d = drawn
    pair = f"above the words {a.word} and {b.word}"
    match family:
        case "word":
            about = f"the {a.colour} {a.shape} on the {video.background(a.start)} background"
            return 1, f"Which word is below {about}?", *(each.word for each in drawn)
        case "number":
            return 1, f"Which number is above the word {a.word}?", *(str(m.number) for m in drawn)
        case "numbers":
            pairs = (f"{x.number}, then {y.number}" for x, y in ((a, b), (a, d), (c, b), (c, d)))
            return 2, f"Which numbers are {pair}, in this order?", *pairs
        case "order":
            in_order = sorted(drawn, key=lambda moment: moment.start)
            return 4, "Which of these words is shown first?", *(each.word for each in in_order)
        case "sum":
            return 2, f"Add the numbers {pair}. What is the sum?", str(a.number + b.number)
        case "when":
            text = f"When is the word {a.word} shown? Give the start and the end in seconds."
            return 1, text, f"[{a.start:g}, {a.end:g}]"
        case _:
            right = video.background(video.seconds)
            wrong = [colour for colour in BACKGROUNDS if colour != right]
            return 0, "What colour is the background at the end of the video?", right, *wrong


# --- demonstrations ---

FRAMES = 4
"""Overview frames of a demonstration: prepare them with `--data.frames 4`."""
_CROP_FRAMES = 16  # at most one per second: the defaults of the protocol
_AROUND = 5  # seconds of a close look before and after what was found

Window = tuple[float, float]


def demonstrations(video: SceneVideo, seed: int) -> list[list[Message]]:
    """Write one conversation in the published layout per question.

    They crop every part of the video where the answer can be, in one turn. For a span of time, a
    second turn crops what the first one found. What the overview shows is answered at once.
    """
    seen = ", ".join(f"{time:.1f} ({colour})" for time, colour in _overview(video))
    overview = f"The frames show only the background, at these seconds: {seen}."
    conversations = []
    for question, moments in questions(video, seed):
        if moments:
            replies = _look(video, question, moments, overview)
        else:
            thought = f"{overview} The last one answers the question."
            replies = [say("assistant", conclude(thought, question.answer))]
        user = say("user", show(video.path), with_options(question.text, question.options))
        conversations.append([say("system", published_format.SYSTEM_WITH_TOOL), user, *replies])
    return conversations


def _overview(video: SceneVideo) -> list[tuple[float, str]]:
    """Return the time and the background of each frame of the overview."""
    times = (overview_indices(video.seconds * FPS, FRAMES) / FPS).tolist()
    return [(time, video.background(time)) for time in times]


def _look(
    video: SceneVideo, question: Question, moments: Sequence[Moment], overview: str
) -> list[Message]:
    """Return calls, reports and the answer."""
    named = video.background(moments[0].start) if "background" in question.text else ""
    # A background that the question names is between two frames of which at least one shows it.
    windows = [
        (math.floor(start), math.ceil(end))
        for (start, before), (end, after) in itertools.pairwise(_overview(video))
        if not named or named in (before, after)
    ]
    turns = _crop(video, f"{overview} The answer is between them, so I look closer.", windows)
    found = {each: times for window in windows for each, times in _sighted(video, window).items()}
    if question.kind is QuestionKind.TEMPORAL_GROUNDING:
        first, last = found[moments[0]][0], found[moments[0]][-1]
        around = max(0, int(first) - _AROUND), min(video.seconds, int(last) + 1 + _AROUND)
        turns += _crop(video, f"It is there at {first:g} seconds. I look closer.", [around])
        times = _sighted(video, around)[moments[0]]
        thought = f"It is there from {times[0]:g} to {times[-1]:g} seconds."
        # At one frame per second, it is gone a second after the last frame that shows it.
        return [*turns, say("assistant", conclude(thought, f"[{times[0]:g}, {times[-1] + 1:g}]"))]
    told = " ".join(_told(video, each, found[each]) for each in moments)
    answer = question.answer
    right = question.options[_LETTERS.index(answer)] if question.options else answer
    return [*turns, say("assistant", conclude(f"{told} So it is {right}.", answer))]


def _crop(video: SceneVideo, thought: str, windows: Sequence[Window]) -> list[Message]:
    """Return one turn with a call per window, and the reports: what the frames of a crop show."""
    calls = "\n".join(call(video.path, *window) for window in windows)
    turns = [say("assistant", f"{think(thought)}{calls}")]
    for window in windows:
        told = " ".join(_told(video, *sighting) for sighting in _sighted(video, window).items())
        turns.append(say("tool", told or "There is no shape and no word."))
    return turns


def _sighted(video: SceneVideo, window: Window) -> dict[Moment, list[float]]:
    """Return the moments that the frames of a crop show, and the times of these frames."""
    shown = video.info.times[window_indices(video.info, *window, 1.0, _CROP_FRAMES)].tolist()
    times = {m: [round(t, 1) for t in shown if m.start <= t < m.end] for m in video.moments}
    return {moment: seconds for moment, seconds in times.items() if seconds}


def _told(video: SceneVideo, moment: Moment, times: Sequence[float]) -> str:
    when = f"from {times[0]:g} to {times[-1]:g}" if len(times) > 1 else f"at {times[0]:g}"
    return (
        f"A {moment.colour} {moment.shape} with the number {moment.number} is above the word "
        f"{moment.word} {when} seconds, on a {video.background(moment.start)} background."
    )


# --- files ---


def write_scenes(settings: SceneSettings, folder: str | os.PathLike[str]) -> None:
    """Write the files that a folder lacks. An interrupted call can be repeated.

    Raises:
        ValueError: A number is too small, or the folder holds other scenes.
        OSError: The disk is full, or another process writes to the folder.
        Stopped: SIGINT or SIGTERM came; the videos that are drawn stay.
    """
    require_local("--out", folder)
    for flag, least in (("seed", 0), ("videos", 4), ("heldout", 1)):
        if (value := getattr(settings, flag)) < least:
            raise ValueError(f"--{flag}: {value}; give {least} or more")
    folder = pathlib.Path(folder)
    for part in (ANNOTATIONS, *(f"{MEDIA}/{split}" for split in SPLITS)):
        (folder / part).mkdir(parents=True, exist_ok=True)
    with lock(folder / ".lock"), naming_full_disk(folder):
        file, wanted = folder / "settings.json", dataclasses.asdict(settings)
        if file.exists():
            stored = json.loads(file.read_text(encoding="utf-8"))
            remedy = "Give another --out, or remove this folder."
            require_same(f"{folder}: holds scenes with other settings", stored, wanted, remedy)
        else:
            write_atomically(file, json.dumps(wanted))
        videos = plan_videos(settings)
        _draw([v for v in videos if not (folder / MEDIA / v.path).exists()], folder / MEDIA)
        if not (folder / "heldout.jsonl").exists():  # the last file
            _write_texts(videos, settings.seed, folder)


def _draw(missing: Sequence[SceneVideo], media: pathlib.Path) -> None:
    # Encoding releases Python's global lock, and drawing does not: more threads would wait for it.
    with Interrupts() as interrupts, ThreadPoolExecutor(4) as pool:

        def draw(video: SceneVideo) -> None:
            # Not `check`, which asks all processes: in a rehearsal only the first one draws.
            if interrupts.asked() is None:
                _draw_video(video, media / video.path)

        drawing = pool.map(draw, missing)
        for _ in tqdm(drawing, "draw", len(missing), unit="video", disable=not missing):
            if (number := interrupts.asked()) is not None:
                raise Stopped(number, "stopped; what is drawn stays")


def _write_texts(videos: Sequence[SceneVideo], seed: int, folder: pathlib.Path) -> None:
    shown = [each for v in videos if v.demonstrated for each in demonstrations(v, seed)]
    annotations = folder / ANNOTATIONS
    published_format.write_conversations(annotations / "paravt_sft_scenes.parquet", shown)
    for split in SPLITS:
        of_split = [video for video in videos if video.split == split and not video.demonstrated]
        asked = [question for video in of_split for question, _ in questions(video, seed)]
        if split == "train":
            rows = [published_format.question_record(question) for question in asked]
            published_format.write_questions(annotations / "paravt_rl_scenes.parquet", rows)
        lines = "".join(json.dumps(_own(question)) + "\n" for question in asked)
        write_atomically(folder / f"{split}.jsonl", lines)


def _own(question: Question) -> dict[str, Any]:
    """Return a question as a line of a file of your own questions."""
    columns = dataclasses.asdict(question)
    columns["question"] = columns.pop("text")
    return {name: value for name, value in columns.items() if value}


# --- the command ---


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The command line."""

    settings: tyro.conf.OmitArgPrefixes[SceneSettings]
    out: str = "data/scenes"
    """Folder to write."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    prog = "python -m paravt_extras.scenes"
    asked = tyro.cli(_Asked, args=argv, prog=prog, description=__doc__)
    return run_command(lambda: write_scenes(asked.settings, asked.out))


if __name__ == "__main__":
    raise SystemExit(main())
