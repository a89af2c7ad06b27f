"""Shows a planned video: the picture of every frame, and the mp4 file."""

from __future__ import annotations

import fractions
import functools
import os
import pathlib

import av
import numpy as np
from jaxtyping import UInt8

from paravt_extras.scenes import sprites
from paravt_extras.scenes.canvas import Canvas
from paravt_extras.scenes.places import draw_place
from paravt_extras.scenes.sprites import Sprite
from paravt_extras.scenes.storyboard import ENTRY, FPS, Chapter, Moment, SceneVideo

# x264 at constant quality and with one thread writes the same bytes every time.
_ENCODER = {"qp": "20", "preset": "superfast", "threads": "1", "bf": "0"}
_GOP_SECONDS = 4

# Places in the frame, in units of its height.
_MARGIN = 0.05
_VEHICLE_TOP = 0.45
_ANIMALS_TOP = 0.87
_SLOT = 0.2  # between two animals
_ROLL = 0.12  # way of a vehicle while it is in view
_DRIFT = 0.006  # way of a cloud per second
_CLOUDS = 3

Picture = UInt8[np.ndarray, "lines columns 3"]


class Film:
    """Draws the frames of a video."""

    def __init__(self, video: SceneVideo):
        self._stages = [_Stage(video, chapter) for chapter in video.chapters]

    def picture(self, frame: int) -> Picture:
        """Return the RGB pixels of a frame: the same array as before if nothing has changed.

        Calls have to be in order of time.
        """
        time = frame / FPS
        stage = next(stage for stage in self._stages if time < stage.chapter.end)
        return stage.picture(time)


class _Stage:
    """The pictures of one chapter."""

    def __init__(self, video: SceneVideo, chapter: Chapter):
        self.chapter = chapter
        self._video = video
        rng = np.random.default_rng(chapter.look)
        self._width = video.width / video.lines
        canvas = Canvas(self._width, 1, video.lines, (0, 0, 0))
        draw_place(chapter.place.name, canvas, rng)
        self._plate = canvas.pixels()[..., :3].copy()
        self._clouds = rng.uniform((-0.2, 0.02), (self._width, 0.30), (_CLOUDS, 2))
        board_on_left = bool(rng.integers(2))
        right = self._width - _MARGIN
        self._board_left = _MARGIN if board_on_left else right - sprites.BOARD_WIDTH
        self._clock_left = right - sprites.CLOCK_WIDTH if board_on_left else _MARGIN
        # The slots of the animals of each moment.
        self._slots = {
            moment: np.sort(rng.permutation(int(self._width / _SLOT))[: moment.animals]).tolist()
            for moment in chapter.moments
        }
        self._background = self._plate
        self._shown: tuple[int, str] | None = None

    def picture(self, time: float) -> Picture:
        """Draw like `Film.picture`."""
        word = next((m.word for m in self.chapter.moments if m.start <= time < m.end), "")
        # Clouds and clock move once per second, so most frames without visitors are alike.
        if self._shown != (int(time), word):
            self._background = self._draw_background(int(time), word)
            self._shown = int(time), word
        visiting = [m for m in self.chapter.moments if m.visit[0] <= time < m.visit[1]]
        if not visiting:
            return self._background
        picture = self._background.copy()
        for moment in visiting:
            self._draw_visitors(picture, moment, time)
        return picture

    def _draw_background(self, second: int, word: str) -> Picture:
        lines = self._video.lines
        picture = self._plate.copy()
        for x, y in self._clouds:
            x += _DRIFT * (second - self.chapter.start)
            _paste(picture, _cloud(lines), x, y, lines)
        _paste(picture, _board(word, lines), self._board_left, 0, lines)
        _paste(picture, _clock(self._video.clock(second), lines), self._clock_left, 0, lines)
        return picture

    def _draw_visitors(self, picture: Picture, moment: Moment, time: float) -> None:
        """Draw vehicle and animals, which come from one side and leave on the other."""
        lines = self._video.lines
        place = self.chapter.place
        away = _away(moment, time)
        if moment.vehicle is not None:
            sign = 1 if moment.vehicle.heading == "right" else -1
            share = (time - moment.start) / (moment.end - moment.start)
            roll = _ROLL * (min(max(share, 0), 1) - 0.5)
            middle = (self._width - sprites.VEHICLE_WIDTH) / 2 + sign * roll
            path = (self._width + sprites.VEHICLE_WIDTH) / 2
            sprite = _vehicle(place.vehicle, moment.vehicle, lines)
            _paste(picture, sprite, middle + sign * path * away, _VEHICLE_TOP, lines)
        for slot in self._slots[moment]:
            hop = 0.008 * abs(np.sin(3 * time + slot))
            left = 0.02 + _SLOT * slot + self._width * away
            _paste(picture, _animal(place.animals, lines), left, _ANIMALS_TOP - hop, lines)


def _away(moment: Moment, time: float) -> float:
    """Return how far a visitor is out of view: from -1 before the moment over 0 to 1 after it."""
    if time < moment.start:
        # The first frame of a visit shows a part of the visitor.
        return (time - moment.start) / (ENTRY + 1 / FPS)
    if time >= moment.end:
        return (time - moment.end + 1 / FPS) / (ENTRY + 1 / FPS)
    return 0.0


def _paste(picture: Picture, sprite: Sprite, left: float, top: float, lines: int) -> None:
    """Blend a sprite into a picture. Parts outside of the picture are cut off."""
    x, y = round(left * lines), round(top * lines)
    height, width = sprite.shape[:2]
    ys = slice(max(y, 0), min(y + height, picture.shape[0]))
    xs = slice(max(x, 0), min(x + width, picture.shape[1]))
    if ys.start >= ys.stop or xs.start >= xs.stop:
        return
    visible = sprite[ys.start - y : ys.stop - y, xs.start - x : xs.stop - x]
    opacity = visible[..., 3:].astype(np.uint16)
    under = picture[ys, xs]
    # 128 rounds to the nearest of 255 levels closely enough.
    under[:] = (under * (255 - opacity) + visible[..., :3] * opacity + 128) // 255


# A process draws one video at a time, and a video has few different sprites.
_cloud = functools.lru_cache(maxsize=4)(sprites.cloud)
_board = functools.lru_cache(maxsize=16)(sprites.board)
_clock = functools.lru_cache(maxsize=4)(sprites.clock)
_animal = functools.lru_cache(maxsize=16)(sprites.animal)
_vehicle = functools.lru_cache(maxsize=16)(sprites.vehicle)


def encode(video: SceneVideo, file: pathlib.Path) -> None:
    """Write a video as H.264. The file appears when it is complete; its folder must exist."""
    film = Film(video)
    # A worker whose parent was killed finishes its video, perhaps beside the next command's worker.
    unfinished = file.with_suffix(f".{os.getpid()}.tmp")
    with av.open(str(unfinished), "w", format="mp4") as container:
        rate = fractions.Fraction(FPS)
        stream = container.add_stream("libx264", rate=rate, options=_ENCODER)
        stream.width = video.width
        stream.height = video.lines
        stream.pix_fmt = "yuv420p"
        stream.gop_size = _GOP_SECONDS * FPS
        frame = shown = None
        for number in range(video.frames):
            picture = film.picture(number)
            if frame is None or picture is not shown:
                shown = picture
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                frame = frame.reformat(format="yuv420p", threads=1)
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    os.replace(unfinished, file)
