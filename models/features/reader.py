"""Videos and their frames, as they are before a vision tower sees them.

A file's size and modification time stand for its content, so a new file under an old name counts as
another video. For an unreadable video every method raises `VideoError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Literal, NamedTuple
from weakref import WeakValueDictionary

import jax
import numpy as np
from jaxtyping import UInt8

from models.config import VisionConfig
from models.features.cache import Grid
from paravt_jax.checks import require_at_least, require_choices
from paravt_jax.data.frames import (
    FrameSource,
    PixelRules,
    ReadFrames,
    ReadTask,
    VideoError,
    VideoInfo,
    join,
)
from paravt_jax.method.records import Frame

_SMALL_FRAME = 49  # visual tokens of the largest frame by default
_MOST_SIZES = 3  # programs of the vision tower

# Videos whose timestamps are kept: 8 bytes per frame, about 100 kB for five minutes.
_MAX_INFOS = 1024

Stamp = tuple[int, int]
"""Size of a file in bytes, and its modification time in nanoseconds."""

Wanted = tuple[int, ...] | int
"""Indices of frames, or the number of frames of an overview."""

Kind = tuple[str, PixelRules]
"""A video, and how its frames are resized. Frames of one kind are read and encoded together."""


@dataclasses.dataclass(frozen=True)
class FrameSettings:
    """How frames are resized, encoded and cached."""

    min_pixels: int = 784
    """Smaller frames are enlarged to this area, in pixels."""
    max_pixels: int = 50_176
    """Larger frames are shrunk to this area, in pixels."""
    crop_max_pixels: int = 0
    """Replaces max_pixels for the frames of crops; 0: the same."""
    # Videos of at most as many frames are encoded whole on first use.
    batch: int = 16
    """Frames of up to 49 visual tokens per call of the vision tower; fewer if larger."""
    cache_mib: int = 4096
    """Size limit of the feature cache, in MiB. Frames of running episodes may exceed it."""
    admission: Literal["arrival", "counted"] = "arrival"
    """When frames join an episode: on arrival, or, to repeat bit for bit, after counted steps."""

    def __post_init__(self):
        require_at_least("frames", self, 1, "min_pixels", "batch")
        numbers = [name for name in vars(self) if name != "admission"]
        require_at_least("frames", self, 0, *numbers)
        require_choices("frames", self)
        for name in ("max_pixels", "crop_max_pixels"):
            most = getattr(self, name) or self.max_pixels
            if most < self.min_pixels:
                raise ValueError(
                    f"frames.{name}: {most}; frames would have at least {self.min_pixels} and at "
                    f"most {most} pixels; raise it, or lower frames.min_pixels"
                )

    def batch_of(self, tokens: int, devices: int = 1) -> int:
        """Return the frames per call of the vision tower if each has this many visual tokens.

        A call has about as many tokens with large frames as with small ones, and every device gets
        equally many frames. A partly filled call costs the same as a full one.
        """
        frames = max(1, self.batch * _SMALL_FRAME // max(_SMALL_FRAME, tokens))
        return math.ceil(frames / devices) * devices

    def padded_sizes(
        self, vision: VisionConfig, videos: Iterable[tuple[int, int]] = ()
    ) -> tuple[int, ...]:
        """Return the visual tokens to which frames are padded: at most three numbers, ascending.

        Each is a program of the vision tower. If frames of the expected videos have few numbers of
        tokens, it is these, and the largest that is allowed.

        Args:
            vision: Sizes of patches and visual tokens.
            videos: (height, width) of the expected videos, in pixels.
        """
        rules = [self.rules(vision, crop) for crop in (False, True)]
        most = {rule.most_tokens for rule in rules}
        expected = set()
        for (height, width), rule in itertools.product(videos, rules):
            # Frames that are too long and thin are refused when they are asked for.
            with contextlib.suppress(ValueError):
                expected.add(min(max(most), rule.tokens(height, width)))
        # Padding of an eighth costs less than another program.
        exact = {tokens for tokens in expected if 8 * tokens <= 7 * max(most)} | {max(most)}
        if expected and len(exact) <= _MOST_SIZES:
            return tuple(sorted(exact))
        half = math.ceil(min(most) / 2)
        return tuple(sorted({*most, half, math.ceil(half / 2)})[-_MOST_SIZES:])

    def rules(self, vision: VisionConfig, crop: bool = False) -> PixelRules:
        """Return how a frame of an overview, or of a crop, becomes what the tower reads."""
        most = (crop and self.crop_max_pixels) or self.max_pixels
        return PixelRules(self.min_pixels, most, vision.patch_size * vision.spatial_merge_size)


def frame_tokens(settings: FrameSettings, vision: VisionConfig, crop: bool = False) -> int:
    """Return the upper bound on a frame's visual tokens. Very wide frames above it are refused."""
    return settings.rules(vision, crop).most_tokens


class FileRead(NamedTuple):
    """Frames of a file that are being read."""

    video: str
    rules: PixelRules | None
    stamp: Stamp | None
    future: Future[ReadFrames]


class VideoFiles:
    """The videos of a folder: what each contains, how its frames are resized, and their reads.

    Args:
        root: Folder of the videos, which are named by their paths relative to it.
        source: Reads the videos.
        settings: How frames are resized, and which videos are read whole.
        vision: Sizes of patches and visual tokens.

    Attributes:
        unreadable: Videos that could not be read, with the reason.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        source: FrameSource,
        settings: FrameSettings,
        vision: VisionConfig,
    ):
        self.root = root
        self.source = source
        self.settings = settings
        self.unreadable: dict[str, str] = {}
        self._vision = vision
        # The oldest first.
        self._infos: dict[str, tuple[Stamp | None, VideoInfo]] = {}
        # Reads that somebody waits for.
        self._futures: WeakValueDictionary[tuple, Future[ReadFrames]] = WeakValueDictionary()

    # --- videos ---

    def info(self, name: str) -> VideoInfo:
        """Return length, size and timestamps of a video."""
        if not self.knows(name):
            if name in self._infos and self.stamp(name) is None:
                # Others may be read before it would turn out.
                raise VideoError(join(self.root, name), "no such file")
            self.wait(self.read(name, ()))
        return self._infos[name][1]

    def knows(self, name: str) -> bool:
        """Return whether `info` needs no file."""
        return name in self._infos and self._infos[name][0] == self.stamp(name)

    def stamp(self, name: str) -> Stamp | None:
        """Return what identifies the content of a file; None if it does not exist."""
        # ValueError: the name contains a NUL.
        with contextlib.suppress(OSError, ValueError):
            stat = os.stat(join(self.root, name))
            return stat.st_size, stat.st_mtime_ns
        return None

    @contextlib.contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Note the reason if a video turns out to be unreadable."""
        try:
            yield
        except VideoError as error:
            self.unreadable[name] = error.reason
            raise

    # --- frames ---

    def rules(self, frame: Frame) -> PixelRules:
        """Return how a frame is resized."""
        return self.rules_of(frame.video, frame.crop)

    def rules_of(self, name: str, crop: bool) -> PixelRules:
        """Return how the frames of a video's overview, or of its crops, are resized."""
        return self.settings.rules(self._vision, crop)

    def grid(self, frame: Frame | str) -> Grid:
        """Return the (height, width) of a frame in patches, after resizing.

        Args:
            frame: A frame, or a video's name for the frames of its overview.

        Raises:
            VideoError: The video is unreadable, or its frames are too long and thin.
        """
        if isinstance(frame, str):
            frame = Frame(frame, 0, 0.0)
        info, rules = self.info(frame.video), self.rules(frame)
        try:
            height, width = rules.size(info.height, info.width)
        except ValueError as error:
            raise VideoError(join(self.root, frame.video), str(error)) from error
        tokens = height * width // rules.factor**2
        if tokens > rules.most_tokens:
            raise VideoError(
                join(self.root, frame.video),
                f"its frames of {info.width} x {info.height} pixels are too long and thin: they "
                f"need {tokens} visual tokens, and frames.max_pixels allows {rules.most_tokens}",
            )
        patch = self._vision.patch_size
        return height // patch, width // patch

    # --- reads ---

    def read(self, name: str, wanted: Wanted, crop: bool = False) -> FileRead:
        """Begin to read a file, unless somebody waits for the very same frames.

        Args:
            name: The video.
            wanted: The frames.
            crop: Whether a crop shows them.
        """
        task = self._task(name, wanted, crop)
        stamp = self.stamp(name)
        future = self._futures.get((stamp, task))
        if future is None or future.cancelled():
            future = self._futures[stamp, task] = self.source.request(task)
        return FileRead(name, task.rules, stamp, future)

    def ahead(self, name: str, wanted: Wanted, crop: bool = False) -> None:
        """Read what `read` will ask for. A file that cannot be read is no error before that."""
        with contextlib.suppress(VideoError):
            self.source.ahead(self._task(name, wanted, crop))

    def _task(self, name: str, wanted: Wanted, crop: bool) -> ReadTask:
        rules = self.rules_of(name, crop)
        return ReadTask(str(join(self.root, name)), wanted, rules, self.settings.batch)

    def read_frames(self, frames: Sequence[Frame]) -> FileRead:
        """Begin to read frames of one kind, with the others that are encoded with them."""
        wanted = tuple(frame.index for frame in self.encoded_with(frames))
        return self.read(frames[0].video, wanted, frames[0].crop)

    def encoded_with(self, frames: Sequence[Frame]) -> Sequence[Frame]:
        """Return the frames that are encoded if some of one kind are missing."""
        first = frames[0]
        everything = range(self.info(first.video).frames)
        if len(everything) > self.settings.batch:
            return frames
        # A key does not depend on the timestamp.
        others = [Frame(first.video, i, 0.0, first.crop) for i in everything]
        return others if {frame.index for frame in frames} <= set(everything) else frames

    def wait(self, read: FileRead) -> ReadFrames:
        """Wait for a file, and keep what `info` returns of it.

        Raises:
            VideoError: The file cannot be read.
        """
        with jax.profiler.TraceAnnotation("files"):
            result = read.future.result()
        self._infos[read.video] = (read.stamp, result.info)
        if len(self._infos) > _MAX_INFOS:
            del self._infos[next(iter(self._infos))]
        return result

    def pixels(self, frames: Sequence[Frame], read: FileRead) -> UInt8[np.ndarray, "m h w 3"]:
        """Wait for m frames of one kind.

        Raises:
            VideoError: The file cannot be read, or does not have these frames.
        """
        result = self.wait(read)
        numbers = {index: number for number, index in enumerate(result.indices)}
        indices = [frame.index for frame in frames]
        if not numbers.keys() >= set(indices):
            raise VideoError(
                join(self.root, read.video),
                f"asked for {min(indices)} to {max(indices)} of its {result.info.frames} frames",
            )
        return result.frames[[numbers[index] for index in indices]]
