"""Decides what happens in the videos of the scenes: places, moments and times. Draws nothing.

A video shows three places, one after the other. At each of six moments, a vehicle with a number
stops for some seconds, a board shows a word, and animals stand in front; three of the moments lack
one of the three. A clock runs all the time, one minute per second.

    seconds  0                     T/3                   2T/3                    T
    place    |      harbour           |        street         |       farm      |
    moments  |    ##      ##     ##   |   ##        ##   ##   |    ##       ##  |
    K = 4    *                      *                     *                     *

A moment lasts more than the time between two overview frames at K = 64, so that an overview of 64
frames shows all of them. It avoids the four frames of K = 4.
"""

from __future__ import annotations

import dataclasses

import numpy as np

SPLITS = ("train", "heldout")
FPS = 8
"""Frames per second of a video."""
ENTRY = 0.75
"""Seconds in which a vehicle or animals come into view before a moment, and leave after it."""
TALL_EVERY = 10
"""With mixed sizes, one of so many videos has 720 lines; the others have 360."""
HEADINGS = ("left", "right")
COLOURS = {
    "red": (196, 30, 34),
    "orange": (240, 128, 20),
    "yellow": (246, 208, 40),
    "green": (34, 132, 62),
    "blue": (32, 78, 190),
    "purple": (118, 48, 150),
    "white": (244, 244, 240),
    "black": (34, 34, 38),
}
WORDS = (
    *("ACCRA", "BASEL", "BERN", "BONN", "CAIRO", "CORK", "DAKAR", "DELHI", "DUBAI", "GENOA"),
    *("HANOI", "KYIV", "LIMA", "LYON", "MIAMI", "MILAN", "MINSK", "OSLO", "PARIS", "PERTH"),
    *("PORTO", "QUITO", "RIGA", "ROME", "SEOUL", "SOFIA", "TOKYO", "TUNIS", "TURIN", "VADUZ"),
)
_NUMBERS = range(12, 99)
_COUNTS = range(2, 8)

_SECONDS = (90, 240)
_SHARES = (0.27, 0.40)  # of a video, of its first and of its last place
_MOMENTS = 6
# Length of a moment in units of the time between two overview frames at K = 64.
_LENGTHS = (1.4, 2.2)
_LEAST_SECONDS = 2.5
_GAP = 0.5  # seconds between moments, their entries included
_TRIES = 10_000


@dataclasses.dataclass(frozen=True)
class Location:
    """A kind of place.

    Attributes:
        name: Its noun.
        where: Where one is at such a place, such as "at a harbour".
        vehicle: What stops there.
        animals: What stands in front, in the plural.
    """

    name: str
    where: str
    vehicle: str
    animals: str


PLACES = (
    Location("street", "in a street", "bus", "pigeons"),
    Location("harbour", "at a harbour", "ferry", "gulls"),
    Location("station", "at a station", "train", "crows"),
    Location("farm", "on a farm", "tractor", "sheep"),
    Location("lake", "at a lake", "balloon", "ducks"),
    Location("mountain", "in the mountains", "cable car", "goats"),
)


@dataclasses.dataclass(frozen=True)
class SceneSettings:
    """Number and size of the videos."""

    seed: int = 0
    """Seed of videos and questions."""
    videos: int = 200
    """Videos to train on; every fourth is for demonstrations."""
    heldout: int = 60
    """Videos to evaluate on."""
    lines: int = 0
    """Height of a frame in pixels, an even number from 320 to 720; 0: mostly 360, some 720."""

    def __post_init__(self):
        if self.seed < 0:
            raise ValueError(f"seed: {self.seed}; give 0 or more")
        if self.videos < 4:
            raise ValueError(
                f"videos: {self.videos}; one of four is for demonstrations: give at least 4"
            )
        if self.heldout < 1:
            raise ValueError(f"heldout: {self.heldout}; give at least 1")
        if self.lines and (not 320 <= self.lines <= 720 or self.lines % 2):
            raise ValueError(
                f"lines: {self.lines}; give an even number from 320 to 720, or 0 for mixed sizes"
            )


@dataclasses.dataclass(frozen=True)
class Vehicle:
    """A vehicle that stops: the name of its colour, its number, and where it points to."""

    colour: str
    number: int
    heading: str


@dataclasses.dataclass(frozen=True)
class Moment:
    """Some seconds in which something happens.

    Attributes:
        start: Second from which all of it is seen.
        end: Second from which something is missing again.
        word: What the board shows, from `start` to `end`; "": nothing.
        vehicle: The vehicle, which comes and leaves within `ENTRY`; None: none.
        animals: Number of animals, which come and leave like the vehicle.
    """

    start: float
    end: float
    word: str = ""
    vehicle: Vehicle | None = None
    animals: int = 0

    @property
    def visit(self) -> tuple[float, float]:
        """Seconds between which any of the vehicle or of the animals is in view."""
        return self.start - ENTRY, self.end + ENTRY


@dataclasses.dataclass(frozen=True)
class Chapter:
    """The time at one place.

    Attributes:
        place: The place.
        start: Second at which it begins.
        end: Second at which the next chapter begins, or the video ends.
        look: Seed of everything that only decorates it.
        moments: Its moments, in order.
    """

    place: Location
    start: float
    end: float
    look: int
    moments: tuple[Moment, ...]


@dataclasses.dataclass(frozen=True)
class SceneVideo:
    """One video.

    Attributes:
        id: Split and number, such as "train/0007".
        split: `train` or `heldout`.
        lines: Height of a frame in pixels.
        seconds: Its length.
        opening: What the clock shows at the beginning, in minutes after midnight.
        chapters: Its chapters, in order.
    """

    id: str
    split: str
    lines: int
    seconds: int
    opening: int
    chapters: tuple[Chapter, ...]

    @property
    def path(self) -> str:
        """Path of its file, relative to the folder of the videos."""
        return f"{self.id}.mp4"

    @property
    def width(self) -> int:
        """Width of a frame in pixels, about 16/9 of its height."""
        return round(self.lines * 16 / 9 / 32) * 32

    @property
    def frames(self) -> int:
        return self.seconds * FPS

    @property
    def moments(self) -> tuple[Moment, ...]:
        """All moments, in order. Their words, vehicles and counts all differ."""
        return tuple(moment for chapter in self.chapters for moment in chapter.moments)

    @property
    def demonstrated(self) -> bool:
        """Whether demonstrations show this video. Then no question is asked about it."""
        return self.split == "train" and int(self.id.split("/")[1]) % 4 == 3

    def chapter_of(self, moment: Moment) -> Chapter:
        return next(chapter for chapter in self.chapters if moment in chapter.moments)

    def clock(self, time: float) -> str:
        """Return what the clock shows at a second of the video."""
        minutes = (self.opening + int(time)) % (24 * 60)
        return f"{minutes // 60:02d}:{minutes % 60:02d}"


def plan_videos(settings: SceneSettings) -> tuple[SceneVideo, ...]:
    """Return all videos, those to train on first. A video does not depend on the number of
    videos."""
    counts = {"train": settings.videos, "heldout": settings.heldout}
    return tuple(
        plan_video(settings, split, number) for split in SPLITS for number in range(counts[split])
    )


def plan_video(settings: SceneSettings, split: str, number: int) -> SceneVideo:
    """Plan one video."""
    rng = np.random.default_rng([settings.seed, SPLITS.index(split), number])
    lines = settings.lines or (720 if number % TALL_EVERY == TALL_EVERY - 1 else 360)
    seconds = int(rng.integers(_SECONDS[0], _SECONDS[1] + 1))
    cuts = _draw_cuts(seconds, rng)
    moments = _fill(_draw_spans(seconds, cuts, rng), rng)
    places = [PLACES[n] for n in rng.permutation(len(PLACES))[: len(cuts) - 1]]
    chapters = tuple(
        Chapter(
            place,
            start,
            end,
            int(rng.integers(2**31)),
            tuple(moment for moment in moments if start <= moment.start < end),
        )
        for place, start, end in zip(places, cuts, cuts[1:], strict=False)
    )
    return SceneVideo(
        id=f"{split}/{number:04d}",
        split=split,
        lines=lines,
        seconds=seconds,
        opening=int(rng.integers(5 * 60, 20 * 60)),
        chapters=chapters,
    )


def _on_grid(seconds: float) -> float:
    """Return the time of the nearest frame."""
    return round(seconds * FPS) / FPS


def _draw_cuts(seconds: int, rng: np.random.Generator) -> list[float]:
    """Return the beginnings of the chapters, and the end of the video."""
    first, last = rng.uniform(*_SHARES, 2)
    return [0.0, _on_grid(first * seconds), _on_grid((1 - last) * seconds), float(seconds)]


def _draw_spans(
    seconds: int, cuts: list[float], rng: np.random.Generator
) -> list[tuple[float, float]]:
    """Return the starts and ends of all moments, in order.

    They keep away from each other, from the cuts, and from the four frames of K = 4.
    """
    last = seconds - 1 / FPS
    taken = [(time, time) for time in (*cuts, last / 3, 2 * last / 3)]
    spans: list[tuple[float, float]] = []
    for _ in range(_TRIES):
        length = max(_LEAST_SECONDS, float(rng.uniform(*_LENGTHS)) * last / 63)
        start = _on_grid(float(rng.uniform(0, seconds - length)))
        end = start + _on_grid(length)
        room = 2 * ENTRY + _GAP
        if all(end + room <= other or after + room <= start for other, after in taken):
            spans.append((start, end))
            taken.append((start, end))
        if len(spans) == _MOMENTS:
            return sorted(spans)
    raise AssertionError(f"{seconds} s have no room for {_MOMENTS} moments")


def _fill(spans: list[tuple[float, float]], rng: np.random.Generator) -> list[Moment]:
    """Decide what each moment shows. Nothing occurs twice."""
    words = [WORDS[n] for n in rng.permutation(len(WORDS))]
    colours = [str(colour) for colour in rng.permutation(list(COLOURS))]
    numbers = [int(number) for number in rng.permutation(_NUMBERS)]
    counts = [int(count) for count in rng.permutation(_COUNTS)]
    headings = [str(heading) for heading in rng.choice(HEADINGS, len(spans))]
    # Three of the moments lack something, each another thing.
    lacks = rng.permutation(["", "", "", "board", "vehicle", "animals"]).tolist()
    return [
        Moment(
            start,
            end,
            word="" if lacks[n] == "board" else words[n],
            vehicle=None if lacks[n] == "vehicle" else Vehicle(colours[n], numbers[n], headings[n]),
            animals=0 if lacks[n] == "animals" else counts[n],
        )
        for n, (start, end) in enumerate(spans)
    ]
