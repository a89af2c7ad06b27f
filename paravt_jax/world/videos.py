"""A small world of videos to learn on: coloured scenes in which a digit shows up for a few seconds.

Owns what is in each video and its mp4 file. Says nothing about it in words: questions and conversations are `text`'s.
Invariant: the settings alone decide every frame that is drawn and, on one machine, that is read back (the halved colour planes change it by
a few grey levels, the coding by none); video n does not depend on how many others there are. The encoder promises no identical bytes.
"""

from __future__ import annotations

import dataclasses
import fractions
import json
import os
import pathlib
from collections.abc import Callable, Sequence

import av
import numpy as np
from jaxtyping import UInt8

from paravt_jax.data.atomic import write_atomically
from paravt_jax.data.frames import VideoInfo
from paravt_jax.data.stored_settings import require_same

SECONDS, STEP, SCENE, WINDOW = (
    128,
    2,
    32,
    16,
)  # of a video, from frame to frame, of a scene, and the border no event crosses
FRAMES = SECONDS // STEP
SPLITS = ("train", "heldout")
MANIFEST = "world.json"
COLOURS = {
    "red": (200, 20, 20),
    "green": (20, 150, 30),
    "blue": (30, 40, 210),
    "yellow": (180, 170, 0),
    "purple": (130, 20, 150),
    "orange": (230, 105, 0),
}
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

# Rows of 5 pixels, 7 rows a digit.
_FONT = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)


@dataclasses.dataclass(frozen=True)
class WorldSettings:
    """How large the world is and what may happen in it."""

    seed: int = 0
    """Decides what is in every video."""
    train_videos: int = 900
    """Videos to train on."""
    heldout_videos: int = 150
    """Videos to evaluate on."""
    size: int = 32
    """Width and height of a frame, in pixels."""
    digit_width: int = 12
    """Width of a digit, in pixels."""
    digit_height: int = 20
    """Height of a digit, in pixels."""
    jitter: int = 4
    """How far a digit may stand off the middle, in pixels."""
    presence: float = 0.85
    """Probability that a scene has a digit; two scenes of a video always have one."""

    def __post_init__(self):
        if not 0 <= self.presence <= 1:
            raise ValueError(
                f"world.presence is {self.presence}; it is a probability, give one from 0 to 1"
            )
        if min(self.train_videos, self.heldout_videos) < 1:
            raise ValueError(
                f"world.train_videos, heldout_videos are {self.train_videos}, {self.heldout_videos}; both need at least 1"
            )
        if max(self.digit_width, self.digit_height) + 2 * self.jitter > self.size or self.size % 2:
            raise ValueError(
                f"world.size is {self.size}; a digit of {self.digit_width}x{self.digit_height} with jitter {self.jitter} has to fit, "
                "and H.264 needs an even size"
            )


@dataclasses.dataclass(frozen=True)
class Scene:
    """`start` to `end` in seconds; the digit (0 to 9, or None) is on the frames `first` to `last`, both included, at `left`, `top`."""

    start: int
    end: int
    colour: str
    digit: int | None = None
    first: int = -1
    last: int = -1
    left: int = 0
    top: int = 0

    def shows(self, time: float) -> bool:
        return self.digit is not None and self.first <= time <= self.last


@dataclasses.dataclass(frozen=True)
class WorldVideo:
    """One video: its path under the world's folder, its width and height in pixels, and its scenes,
    in order."""

    id: str
    split: str
    path: str
    size: int
    scenes: tuple[Scene, ...]


def plan(settings: WorldSettings) -> tuple[WorldVideo, ...]:
    """Every video of the world, train first, without drawing any."""
    counts = {"train": settings.train_videos, "heldout": settings.heldout_videos}
    return tuple(_video(settings, split, n) for split in SPLITS for n in range(counts[split]))


def _video(settings: WorldSettings, split: str, number: int) -> WorldVideo:
    rng = np.random.default_rng([settings.seed, SPLITS.index(split), number])
    colours = rng.permutation(list(COLOURS))
    digits = rng.permutation(len(DIGITS))
    present = rng.random(SECONDS // SCENE) < settings.presence
    present[rng.permutation(len(present))[:2]] = True
    scenes = []
    for n, shown in enumerate(present):
        scene = Scene(n * SCENE, (n + 1) * SCENE, str(colours[n]))
        frames = int(rng.integers(2, 4))  # 2 to 4 seconds from the first to the last
        first = (
            scene.start
            + WINDOW * int(rng.integers(SCENE // WINDOW))
            + STEP * int(rng.integers(WINDOW // STEP - frames + 1))
        )
        left, top = rng.integers(-settings.jitter, settings.jitter + 1, 2)
        if shown:
            left += (settings.size - settings.digit_width) // 2
            top += (settings.size - settings.digit_height) // 2
            last = first + STEP * (frames - 1)
            scene = dataclasses.replace(
                scene, digit=int(digits[n]), first=first, last=last, left=int(left), top=int(top)
            )
        scenes.append(scene)
    name = f"{split}/{number:04d}"
    return WorldVideo(name, split, name + ".mp4", settings.size, tuple(scenes))


def picture(
    settings: WorldSettings, scene: Scene, digit: bool
) -> UInt8[np.ndarray, "height width 3"]:
    """A frame of the scene, with its digit or without."""
    image = np.empty((settings.size, settings.size, 3), np.uint8)
    image[:] = COLOURS[scene.colour]
    if digit and scene.digit is not None:
        glyph = np.array([[c == "1" for c in row] for row in _FONT[scene.digit].split()])
        rows = np.arange(settings.digit_height) * glyph.shape[0] // settings.digit_height
        columns = np.arange(settings.digit_width) * glyph.shape[1] // settings.digit_width
        box = image[
            scene.top : scene.top + settings.digit_height,
            scene.left : scene.left + settings.digit_width,
        ]
        box[glyph[np.ix_(rows, columns)]] = 255
    return image


class DrawnVideos:
    """Draws frames when they are read: a `FrameSource` of the world's videos without mp4 files.

    Paths are `WorldVideo.path`: give `FrameFeatures` the root `Path()`.
    """

    def __init__(self, settings: WorldSettings, videos: Sequence[WorldVideo]):
        self._settings = settings
        self._scenes = {video.path: video.scenes for video in videos}

    def probe(self, path: pathlib.Path) -> VideoInfo:
        times = np.arange(0.0, SECONDS, STEP)
        return VideoInfo(
            str(path), FRAMES, float(SECONDS), times, self._settings.size, self._settings.size
        )

    def read(self, path: pathlib.Path, indices: list[int]) -> UInt8[np.ndarray, "m h w 3"]:
        frames = []
        for time in (STEP * index for index in indices):
            scene = self._scenes[str(path)][time // SCENE]
            frames.append(picture(self._settings, scene, scene.shows(time)))
        return np.stack(frames)


def render(
    settings: WorldSettings,
    folder: str | os.PathLike,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[WorldVideo, ...]:
    """Draws every video that the folder lacks, then the manifest; returns `plan(settings)`.

    Files appear whole or not at all, so an interrupted call goes on where it was. `progress` is told videos done and in all.
    Raises ValueError where the folder holds the world of other settings.
    """
    folder = pathlib.Path(folder)
    videos = plan(settings)
    _claim(settings, folder)
    if not _finished(folder):
        for n, video in enumerate(videos):
            path = folder / video.path
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                _encode(settings, video, path)
            if progress is not None:
                progress(n + 1, len(videos))
        manifest = {
            "settings": dataclasses.asdict(settings),
            "videos": [dataclasses.asdict(v) for v in videos],
        }
        write_atomically(folder / MANIFEST, json.dumps(manifest))
    return videos


def _claim(settings: WorldSettings, folder: pathlib.Path) -> None:
    """Writes the settings before any video, so that half a world is not finished with other settings."""
    path, mine = folder / "settings.json", dataclasses.asdict(settings)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_atomically(path, json.dumps(mine))
    require_same(
        f"world: {folder} holds a world of other settings",
        json.loads(path.read_text()),
        mine,
        "Choose another folder, or remove it.",
    )


def _finished(folder: pathlib.Path) -> bool:
    return (folder / MANIFEST).exists()


def _encode(settings: WorldSettings, video: WorldVideo, path: pathlib.Path) -> None:
    """One H.264 mp4 with closed GOPs, lossless: even with one thread x264 does not choose alike every time, and a lossy picture shows it.
    Few frames differ, so each is converted once and sent with many timestamps.
    """
    unfinished = path.with_suffix(".tmp")
    with av.open(str(unfinished), "w", format="mp4") as container:
        stream = container.add_stream(
            "libx264",
            rate=fractions.Fraction(1, STEP),
            options={"qp": "0", "preset": "veryfast", "threads": "1", "bf": "0"},
        )
        stream.width = stream.height = settings.size
        stream.pix_fmt = "yuv420p"
        stream.gop_size = WINDOW // STEP
        for scene in video.scenes:
            plain, shown = (_frame(settings, scene, digit) for digit in (False, True))
            for time in range(scene.start, scene.end, STEP):
                frame = shown if scene.shows(time) else plain
                frame.pts = time // STEP
                container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    os.replace(unfinished, path)


def _frame(settings: WorldSettings, scene: Scene, digit: bool) -> av.VideoFrame:
    return av.VideoFrame.from_ndarray(picture(settings, scene, digit), format="rgb24").reformat(
        format="yuv420p", threads=1
    )


def of_split(videos: Sequence[WorldVideo], split: str) -> tuple[WorldVideo, ...]:
    """The videos of one split, `train` or `heldout`."""
    return tuple(video for video in videos if video.split == split)
