"""Visual features of video frames, computed once per frame and cached.

Overview, crops, sampler and training step all get features here:

    videos --VideoFiles--> pixels --FrameEncoder--> features --FeatureCache--> visual vectors

If a part of the tower is trained, what is cached is that part's input (`models.trained`).
Visual vectors, which samplers read, are computed from it and kept until other weights are loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from models.config import ModelConfig
from models.features.cache import Encoded, FeatureCache, FrameKey
from models.features.encoder import FrameEncoder
from models.features.reader import FileRead, FrameSettings, Kind, VideoFiles
from models.sharding import Lowering
from models.trained import TrainedVision, cached_shape
from models.vision import VisionTower
from paravt_jax.data.frames import (
    FrameSource,
    VideoError,
    overview_indices,
    window_indices,
)
from paravt_jax.method.records import Frame

_FRAMES_PER_STEP = 64  # frames that count as one step of the sampler


@dataclasses.dataclass(frozen=True)
class ShownFrames:
    """Frames, and what is cached of each. This stays in memory for as long as somebody holds it."""

    frames: tuple[Frame, ...]
    cached: tuple[Shaped[np.ndarray, "..."], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class FrameReading:
    """Frames whose files are being read. An agent awaits it, and gets `ShownFrames`.

    `await` hands this object to the scheduler (`rollout.engine.requests`), which resumes the agent
    when the files have been read. Then it raises VideoError if one of them cannot be read.
    """

    features: FrameFeatures
    choose: Callable[[], tuple[Frame, ...]]
    """The frames, once the length of their video is known."""
    count: int
    """Number of the frames."""
    held: Mapping[FrameKey, np.ndarray]
    """What was in memory from the start, and stays there."""
    reads: Sequence[FileRead]
    """Files that are being read."""

    @property
    def steps(self) -> int | None:
        """Steps of the sampler after which the agent goes on; None: when the files are read.

        This must not depend on what is in memory: a run that was killed begins with nothing.
        """
        if self.features.settings.admission == "arrival":
            return None
        return max(1, math.ceil(self.count / _FRAMES_PER_STEP))

    def done(self) -> bool:
        """Return whether all files have been read, or cannot be read."""
        return all(read.future.done() for read in self.reads)

    def result(self) -> ShownFrames:
        """Wait for the files, and encode their frames."""
        return self.features.take(self)

    def __await__(self) -> Generator[FrameReading, None, ShownFrames]:
        yield self
        return self.result()


def wait_for_one(readings: Sequence[FrameReading], patience: float | None = None) -> None:
    """Wait until one of some readings is done, or a file was waited for that many seconds."""
    while not any(reading.done() for reading in readings):
        futures = [read.future for reading in readings for read in reading.reads]
        unread = [future for future in futures if not future.done()]
        with jax.profiler.TraceAnnotation("files"):
            if not wait(unread, patience, return_when=FIRST_COMPLETED).done:
                return


class FrameFeatures(VideoFiles):
    """Features of frames: read from their files, encoded by the vision tower, and cached.

    Calling it with frames returns features [tokens, c, d]: the visual tokens of all frames in
    order, with c = 1 + DeepStack levels. They are a NumPy array in `dtype`, the type in which the
    tower computes (bfloat16 is that of ml_dtypes), and are never converted.

    Nothing here waits for a file if an agent awaits `request` before, and holds what it gets. For
    an unreadable video every method raises `VideoError`.

    Args:
        tower: The vision tower; None if nothing is encoded.
        config: The model's sizes.
        settings: Sizes of frames and of the cache.
        root: Folder of the videos (`models.features.reader.VideoFiles`).
        source: Reads the videos.
        trained: The part of the tower that is trained; None: none is.

    Attributes:
        cache: What has been encoded.
        encoder: The tower. A subclass that caches something else has another one.
        dtype: Type of the features.
        vector: The shape of what is cached per visual token.
        encoded_frames: Number of frames that have been encoded so far.
    """

    def __init__(
        self,
        tower: VisionTower | None,
        config: ModelConfig,
        settings: FrameSettings,
        root: str | os.PathLike,
        source: FrameSource,
        trained: TrainedVision | None = None,
    ):
        super().__init__(root, source, settings, config.vision)
        self.config = config
        self.cache = FeatureCache(settings.cache_mib * 2**20)
        self.trained = trained
        self.vector = cached_shape(config.vision, "none") if trained is None else trained.vector
        self.dtype = np.dtype(np.float32 if tower is None else tower.dtype)
        if tower is not None:
            self.encoder = FrameEncoder(tower, settings, trained)
        self.encoded_frames = 0

    # --- features ---

    def __call__(self, frames: Sequence[Frame]) -> Shaped[np.ndarray, "m ..."]:
        if self.trained is None:
            return self.cached(frames)
        keys, features, missing = self._look_up(frames, self.encoder.version)
        for some in missing.values():
            cached = np.stack(self.request(some).result().cached)
            vectors = self.encoder.finish(cached, self.grid(some[0]))
            finished = self.keys(some, self.encoder.version)
            for key, encoded in zip(finished, vectors, strict=True):
                features[key] = encoded.fetch()
        self.cache.add(features)
        return np.concatenate([features[key] for key in keys])

    def cached(self, frames: Sequence[Frame]) -> Shaped[np.ndarray, "m ..."]:
        """Return what is cached of frames, [tokens, c, w], which training reads.

        These are their visual vectors, unless a part of the tower is trained.
        """
        return np.concatenate(self.request(frames).result().cached)

    def request(self, frames: Sequence[Frame]) -> FrameReading:
        """Begin to read the frames that are not in memory, without waiting for their files."""
        frames = tuple(frames)
        _, held, missing = self._look_up(frames)
        reads = [self.read_frames(some) for some in missing.values()]
        return FrameReading(self, lambda: frames, len(frames), held, reads)

    def request_overview(self, name: str, count: int) -> FrameReading:
        """Begin to read the overview of a video, which may never have been opened before."""
        known = self.overview(name, count) if self.knows(name) else ()
        _, held, missing = self._look_up(known)
        # By their number, not by indices: that is how files are read ahead.
        reads = [] if known and not missing else [self.read(name, count)]
        return FrameReading(self, lambda: self.overview(name, count), count, held, reads)

    def take(self, reading: FrameReading) -> ShownFrames:
        """Encode frames whose files have been read.

        Raises:
            VideoError: A file cannot be read, or the video does not have these frames.
        """
        for read in reading.reads:
            with self.noting(read.video):
                self.wait(read)
        frames = reading.choose()
        keys, features, missing = self._look_up(frames)
        # One batch after the other, so that the devices never hold all of them.
        for key, encoded in self._encode(missing, reading.reads):
            features[key] = encoded.fetch()
        self.cache.add(features)
        return ShownFrames(frames, tuple(features[key] for key in keys))

    def start(self, frames: Sequence[Frame]) -> None:
        """Read frames and begin to encode them, without waiting for the devices.

        A later call with these frames takes the results, which are on the devices until then. Those
        that no call has taken go into the cache at the next `start`. Frames that cannot be read are
        left to the later call, which raises the error.
        """
        self.cache.settle()
        by_video: dict[str, list[Frame]] = {}
        for frame in frames:
            by_video.setdefault(frame.video, []).append(frame)
        readings: list[FrameReading] = []
        for some in by_video.values():
            with contextlib.suppress(VideoError):
                readings.append(self.request(some))
        for reading in readings:
            with contextlib.suppress(VideoError):
                _, _, missing = self._look_up(reading.choose())
                self.cache.add_pending(dict(self._encode(missing, reading.reads)))

    def _look_up(
        self, frames: Sequence[Frame], version: int | None = None
    ) -> tuple[list[FrameKey], dict[FrameKey, np.ndarray], dict[Kind, list[Frame]]]:
        """Return the keys of frames, the features that are in memory, and the other frames by kind.

        Batches never mix kinds: features must not depend on what else was asked for.
        """
        keys = self.keys(frames, version)
        features = self.cache.find(keys)
        missing: dict[Kind, list[Frame]] = {}
        for key, frame in dict(zip(keys, frames, strict=True)).items():
            if key not in features:
                missing.setdefault((key.video, key.rules), []).append(frame)
        return keys, features, missing

    def _encode(
        self, missing: Mapping[Kind, Sequence[Frame]], reads: Iterable[FileRead]
    ) -> Iterator[tuple[FrameKey, Encoded]]:
        """Encode frames, and those that are encoded with them, each with its key."""
        by_kind = {(read.video, read.rules): read for read in reads}
        for kind, some in missing.items():
            with self.noting(kind[0]):
                read = by_kind.get(kind) or self.read_frames(some)
                frames = self.encoded_with(some)
                pixels = self.pixels(frames, read)
                self.encoded_frames += len(pixels)
                keys = self.keys(frames)
                yield from zip(keys, self.encoder.encode(pixels, keys[0].grid), strict=True)

    # --- frames ---

    def overview(self, name: str, count: int) -> tuple[Frame, ...]:
        """Return `count` frames spread evenly over the whole video."""
        return self._frames(name, overview_indices(self.info(name).frames, count))

    def window(
        self, name: str, start: float, end: float, fps: float, limit: int
    ) -> tuple[Frame, ...]:
        """Return at most `limit` frames of the window [start, end] in seconds, at `fps`."""
        indices = window_indices(self.info(name), start, end, fps, limit)
        return self._frames(name, indices, crop=True)

    def _frames(self, name: str, indices: np.ndarray, crop: bool = False) -> tuple[Frame, ...]:
        times = self.info(name).times
        return tuple(Frame(name, int(i), float(times[i]), crop) for i in indices)

    def tokens(self, frame: Frame | str) -> int:
        """Return the visual tokens of a frame, or of each frame of a video's overview."""
        return math.prod(self.grid(frame)) // self.config.vision.spatial_merge_size**2

    def keys(self, frames: Sequence[Frame], version: int | None = None) -> list[FrameKey]:
        """Return the cache keys of frames, or of what trained weights of a version make of them."""
        # Of one kind, they differ in the index only. So the file is asked once.
        kinds: dict[tuple[str, bool], FrameKey] = {}
        keys = []
        for frame in frames:
            kind = frame.video, frame.crop
            if kind not in kinds:
                stamp, grid, rules = self.stamp(frame.video), self.grid(frame), self.rules(frame)
                kinds[kind] = FrameKey(frame.video, stamp, frame.index, grid, rules, version)
            keys.append(kinds[kind]._replace(index=frame.index))
        return keys

    # --- the vision tower ---

    def expect(self, videos: Iterable[tuple[int, int]]) -> None:
        """Choose the sizes of calls for videos of these sizes; others may come, but pay padding.

        Args:
            videos: (height, width) of videos, in pixels.
        """
        self.encoder.sizes = self.settings.padded_sizes(self.config.vision, videos)

    def lowerings(self) -> Iterator[Lowering]:
        """Return the tower's programs, for `models.compilation`. No video needs another one."""
        return self.encoder.lowerings()

    def load(self, weights: Any) -> None:
        """Replace the weights of the trained part, and forget what the old ones computed.

        Args:
            weights: See `FrameEncoder.load`.
        """
        self.encoder.load(weights)
        self.cache.drop(lambda key: key.version is not None)

    def fingerprint(self) -> int:
        """Return the fingerprint of the weights that `load` has replaced."""
        return self.encoder.fingerprint()
