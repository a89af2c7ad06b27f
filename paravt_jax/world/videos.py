"""A small world of videos to learn on: coloured scenes in which a digit appears for a few seconds.

A video of 128 seconds has four scenes of 32 seconds; each scene has two windows of 16 seconds:

    seconds  0          16         32         48         64
    scene    |     red, "seven"    |         blue        |  green, "two" ...
    window   |          |   777    |          |          |

A digit stays within one window, so that one crop of a window shows all of it.

Every frame depends on the settings alone, and video n does not depend on the number of videos. On
one machine, every run decodes the same frames, although the bytes of the files may differ. Decoded
frames differ from drawn ones by a few grey levels, because H.264 stores colours at half resolution.
"""

from __future__ import annotations

import dataclasses
import fractions
import os
import pathlib
from collections.abc import Sequence
from concurrent.futures import Future

import av
import numpy as np
from jaxtyping import UInt8

from paravt_jax.checks import require_at_least, require_share
from paravt_jax.data.frames import (
    PixelRules,
    ReadFrames,
    ReadTask,
    VideoInfo,
    carry_out,
    read_now,
    shown,
)

# Times are in seconds.
SECONDS = 128
"""Length of a video."""
STEP = 2
"""Time from one frame to the next."""
SCENE = 32
"""Length of a scene."""
WINDOW = 16
"""Length of a window. No digit crosses its border."""
FRAMES = SECONDS // STEP
SPLITS = ("train", "heldout")
COLOURS = {
    "red": (200, 20, 20),
    "green": (20, 150, 30),
    "blue": (30, 40, 210),
    "yellow": (180, 170, 0),
    "purple": (130, 20, 150),
    "orange": (230, 105, 0),
}
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

# The digits from zero to nine: 7 rows of 5 pixels each.
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
    """Number and size of the videos, and the digits in their scenes."""

    seed: int = 0
    """Seed of the contents of all videos."""
    train_videos: int = 900
    """Number of videos to train on."""
    heldout_videos: int = 150
    """Number of videos to evaluate on."""
    size: int = 32
    """Width and height of a frame, in pixels."""
    digit_width: int = 12
    """Width of a digit, in pixels."""
    digit_height: int = 20
    """Height of a digit, in pixels."""
    jitter: int = 4
    """Largest distance of a digit from the centre along each axis, in pixels."""
    presence: float = 0.85
    """Probability that a scene has a digit; two scenes of a video always have one."""

    def __post_init__(self):
        require_share("world", self, "presence")
        require_at_least("world", self, 1, "train_videos", "heldout_videos")
        if max(self.digit_width, self.digit_height) + 2 * self.jitter > self.size or self.size % 2:
            raise ValueError(
                f"world.size is {self.size}; a digit of {self.digit_width}x{self.digit_height} "
                f"with jitter {self.jitter} has to fit, and H.264 needs an even size"
            )


@dataclasses.dataclass(frozen=True)
class Scene:
    """A scene of a video: a colour, and perhaps a digit for some seconds.

    Attributes:
        start: Second at which it starts.
        end: Second at which the next scene starts.
        colour: Name of the background colour.
        digit: 0 to 9, or None.
        first: Time of the first frame with the digit, in seconds.
        last: Time of the last frame with the digit.
        left: Left edge of the digit in pixels.
        top: Upper edge of the digit in pixels.
    """

    start: int
    end: int
    colour: str
    digit: int | None = None
    first: int = -1
    last: int = -1
    left: int = 0
    top: int = 0

    def shows(self, time: float) -> bool:
        """Return whether the frame at `time` shows the digit."""
        return self.digit is not None and self.first <= time <= self.last


@dataclasses.dataclass(frozen=True)
class WorldVideo:
    """One video of the world.

    Attributes:
        id: Split and number, such as "train/0007".
        split: `train` or `heldout`.
        path: Path below the world's folder.
        size: Width and height in pixels.
        scenes: The scenes in order.
    """

    id: str
    split: str
    path: str
    size: int
    scenes: tuple[Scene, ...]


def plan(settings: WorldSettings) -> tuple[WorldVideo, ...]:
    """Return all videos of the world, the train split first. Nothing is drawn yet."""
    counts = {"train": settings.train_videos, "heldout": settings.heldout_videos}
    return tuple(
        _plan_video(settings, split, number) for split in SPLITS for number in range(counts[split])
    )


def _plan_video(settings: WorldSettings, split: str, number: int) -> WorldVideo:
    # Seeded by split and number, so that a video does not depend on the others.
    rng = np.random.default_rng([settings.seed, SPLITS.index(split), number])
    colours = rng.permutation(list(COLOURS))
    digits = rng.permutation(len(DIGITS))
    present = rng.random(SECONDS // SCENE) < settings.presence
    # At least two scenes need a digit, because a video has up to two questions.
    present[rng.permutation(len(present))[:2]] = True
    scenes = tuple(
        _plan_scene(settings, n, str(colours[n]), int(digits[n]) if present[n] else None, rng)
        for n in range(len(present))
    )
    name = f"{split}/{number:04d}"
    return WorldVideo(name, split, name + ".mp4", settings.size, scenes)


def _plan_scene(
    settings: WorldSettings,
    number: int,
    colour: str,
    digit: int | None,
    rng: np.random.Generator,
) -> Scene:
    start = number * SCENE
    end = start + SCENE
    # Two or three frames: 2 or 4 seconds from the first to the last.
    frames = int(rng.integers(2, 4))
    window = start + WINDOW * int(rng.integers(SCENE // WINDOW))
    first = window + STEP * int(rng.integers(WINDOW // STEP - frames + 1))
    shift_x, shift_y = rng.integers(-settings.jitter, settings.jitter + 1, 2)
    # A scene without a digit draws the same numbers, so `presence` does not change other scenes.
    if digit is None:
        return Scene(start, end, colour)
    return Scene(
        start,
        end,
        colour,
        digit,
        first=first,
        last=first + STEP * (frames - 1),
        left=int(shift_x) + (settings.size - settings.digit_width) // 2,
        top=int(shift_y) + (settings.size - settings.digit_height) // 2,
    )


def picture(
    settings: WorldSettings, scene: Scene, digit: bool
) -> UInt8[np.ndarray, "height width 3"]:
    """Draw a frame of a scene in RGB, with its digit or without."""
    image = np.empty((settings.size, settings.size, 3), np.uint8)
    image[:] = COLOURS[scene.colour]
    if digit and scene.digit is not None:
        font_rows = _FONT[scene.digit].split()
        glyph = np.array([[pixel == "1" for pixel in row] for row in font_rows])
        # Enlarge the glyph by repeating its rows and columns.
        rows = np.arange(settings.digit_height) * glyph.shape[0] // settings.digit_height
        columns = np.arange(settings.digit_width) * glyph.shape[1] // settings.digit_width
        box = image[
            scene.top : scene.top + settings.digit_height,
            scene.left : scene.left + settings.digit_width,
        ]
        box[glyph[np.ix_(rows, columns)]] = 255
    return image


class DrawnVideos:
    """A `FrameSource` that draws frames when they are read, so that no mp4 files are needed.

    Its paths are those of `WorldVideo`, without a folder: give `FrameFeatures` the root `Path()`.
    """

    def __init__(self, settings: WorldSettings, videos: Sequence[WorldVideo]):
        self._settings = settings
        self._scenes = {video.path: video.scenes for video in videos}

    def _probe(self, path: str) -> VideoInfo:
        times = np.arange(0.0, SECONDS, STEP)
        size = self._settings.size
        return VideoInfo(FRAMES, float(SECONDS), times, size, size)

    def _read(
        self, path: str, indices: Sequence[int], rules: PixelRules | None
    ) -> UInt8[np.ndarray, "m h w 3"]:
        frames = []
        for index in indices:
            time = STEP * index
            scene = self._scenes[path][time // SCENE]
            frames.append(shown(picture(self._settings, scene, scene.shows(time)), rules))
        return np.stack(frames)

    def request(self, task: ReadTask) -> Future[ReadFrames]:
        """Draw the frames at once."""
        return read_now(lambda: carry_out(task, self._probe, self._read))

    def ahead(self, task: ReadTask) -> None:
        """Do nothing: `request` draws the frames at once."""


def render(settings: WorldSettings, video: WorldVideo, folder: str | os.PathLike) -> None:
    """Write the mp4 file of a video, unless it exists: a file that exists is complete.

    Files of another world are kept as well, so give each world its own folder.
    """
    path = pathlib.Path(folder, video.path)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        encode(settings, video.scenes, path)


def encode(settings: WorldSettings, scenes: Sequence[Scene], path: pathlib.Path) -> None:
    """Write one H.264 mp4 with closed GOPs of one window each.

    Args:
        settings: Size of frames and digits.
        scenes: The scenes in order; the first starts at 0.
        path: The file, which appears when it is complete. Its folder must exist.
    """
    unfinished = path.with_suffix(".tmp")
    # "qp": "0" is lossless. With lossy coding the pixels would vary between runs, because x264 does
    # not always make the same choices, even with one thread.
    options = {"qp": "0", "preset": "veryfast", "threads": "1", "bf": "0"}
    with av.open(str(unfinished), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fractions.Fraction(1, STEP), options=options)
        stream.width = stream.height = settings.size
        stream.pix_fmt = "yuv420p"
        stream.gop_size = WINDOW // STEP
        for scene in scenes:
            # A scene has only two different pictures. Convert each once.
            without_digit = _frame(settings, scene, False)
            with_digit = _frame(settings, scene, True)
            for time in range(scene.start, scene.end, STEP):
                frame = with_digit if scene.shows(time) else without_digit
                frame.pts = time // STEP
                container.mux(stream.encode(frame))
        # Flush the encoder.
        container.mux(stream.encode(None))
    os.replace(unfinished, path)


def _frame(settings: WorldSettings, scene: Scene, digit: bool) -> av.VideoFrame:
    frame = av.VideoFrame.from_ndarray(picture(settings, scene, digit), format="rgb24")
    return frame.reformat(format="yuv420p", threads=1)


def of_split(videos: Sequence[WorldVideo], split: str) -> tuple[WorldVideo, ...]:
    """Return the videos of one split, `train` or `heldout`."""
    return tuple(video for video in videos if video.split == split)
