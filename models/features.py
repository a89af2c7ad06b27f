"""Visual features of video frames, computed once per frame and cached.

Overview, crops, sampler and training step all get features here. The vision tower is frozen, so a
frame's features depend only on the video's content, the frame index, the size and the tower's
version: these are the cache key. A file's length and modification time stand for its content, so a
new file under an old name counts as another video. For an unreadable video every method raises
`VideoError`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jaxtyping import Shaped, UInt8

from models.patches import patchify
from models.qwen3_vl.config import Qwen3VLConfig, VisionConfig
from models.qwen3_vl.vision import VisionTower, frame_layout
from paravt_jax.data.frames import (
    FrameSource,
    VideoError,
    VideoInfo,
    overview_indices,
    resize,
    window_indices,
)
from paravt_jax.data.sizes import smart_resize
from paravt_jax.method.records import Frame

# Videos whose timestamps are kept: 8 bytes per frame, about 100 kB for five minutes.
_MAX_INFOS = 1024


@dataclasses.dataclass(frozen=True)
class FrameSettings:
    """How frames are resized (REFERENCE 3, step 5), encoded and cached."""

    min_pixels: int = 784
    """Smaller frames are enlarged to this area, in pixels."""
    max_pixels: int = 50_176
    """Larger frames are shrunk to this area, in pixels."""
    batch: int = 16
    """Frames per call of the vision tower, about one crop. A partly filled call costs the same."""
    whole_frames: int = 0
    """Videos of at most this many frames are encoded whole on first use."""
    cache_mib: int = 4096
    """Size limit of the feature cache, in MiB."""

    def __post_init__(self):
        for name, least in (("min_pixels", 1), ("batch", 1), ("whole_frames", 0), ("cache_mib", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"frames.{name}: {getattr(self, name)}; give a whole number of at least {least}"
                )
        if self.max_pixels < self.min_pixels:
            raise ValueError(
                f"frames.max_pixels: {self.max_pixels}; give at least frames.min_pixels = "
                f"{self.min_pixels}"
            )


def frame_tokens(settings: FrameSettings, vision: VisionConfig) -> int:
    """Upper bound on the visual tokens of a frame. Very wide frames that exceed it are refused."""
    factor = vision.patch_size * vision.spatial_merge_size
    return max(1, settings.max_pixels // factor**2)


class FrameFeatures:
    """A cache of frame features in front of a vision tower.

    Calling it with frames returns float32 features [tokens, c, d]: the visual tokens of all frames
    in order, with c = 1 + DeepStack levels. The least recently used frames leave the cache first.

    Args:
        tower: the frozen vision tower; None for a subclass that does not need it.
        config: the model's sizes.
        settings: sizes of frames and of the cache.
        root: folder of the videos. Videos are named by their path relative to it.
        source: reads the videos.
        version: version of the tower's weights.
    """

    def __init__(
        self,
        tower: VisionTower | None,
        config: Qwen3VLConfig,
        settings: FrameSettings,
        root: Path,
        source: FrameSource,
        version: int = 0,
    ):
        self.config = config
        self.settings = settings
        self.root = Path(root)
        self.source = source
        self.version = version
        # Videos that could not be read, with the reason.
        self.unreadable: dict[str, str] = {}
        self.encoded_frames = 0
        if tower is not None:
            # The weights are an argument: closed over, they would be compiled into the program.
            graph, self._weights = nnx.split(tower)
            self._encode = jax.jit(
                lambda weights, patches, layout: nnx.merge(graph, weights)(patches, layout)
            )
        # Both ordered dictionaries have the least recently used entry first.
        self._store: collections.OrderedDict[tuple, np.ndarray] = collections.OrderedDict()
        self.cached_bytes = 0
        self._frames_in_store: collections.Counter[str] = collections.Counter()
        self._contents: dict[str, tuple[int, int]] = {}
        self._infos: collections.OrderedDict[str, tuple[tuple[int, int] | None, VideoInfo]] = (
            collections.OrderedDict()
        )

    @property
    def cached_frames(self) -> int:
        """Number of frames in the cache."""
        return len(self._store)

    def info(self, name: str) -> VideoInfo:
        """Length, size and timestamps of a video."""
        content = self._content(name)
        known = self._infos.get(name)
        if known is None or known[0] != content:
            known = (content, self.source.probe(self.root / name))
            self._infos[name] = known
            if len(self._infos) > _MAX_INFOS:
                self._drop_oldest_info(keep=name)
        self._infos.move_to_end(name)
        return known[1]

    def _drop_oldest_info(self, keep: str) -> None:
        # Videos with frames in the store keep their info. It is still needed, and if the file is
        # gone it cannot be read again.
        for name in self._infos:
            if name != keep and not self._frames_in_store[name]:
                del self._infos[name]
                return

    def _content(self, name: str) -> tuple[int, int] | None:
        """Length in bytes and modification time of a file, which identify its content.

        For a file that is gone these are the last known ones, so that its cached frames stay
        usable. None for a file that never existed.
        """
        # ValueError: the name contains a NUL.
        with contextlib.suppress(OSError, ValueError):
            stat = os.stat(self.root / name)
            self._contents[name] = (stat.st_size, stat.st_mtime_ns)
        return self._contents.get(name)

    def overview(self, name: str, count: int) -> tuple[Frame, ...]:
        """`count` frames spread evenly over the whole video."""
        return self._frames(name, overview_indices(self.info(name).frames, count))

    def window(
        self, name: str, start: float, end: float, fps: float, limit: int
    ) -> tuple[Frame, ...]:
        """At most `limit` frames of the window [start, end] in seconds, at `fps`."""
        return self._frames(name, window_indices(self.info(name), start, end, fps, limit))

    def _frames(self, name: str, indices: np.ndarray) -> tuple[Frame, ...]:
        times = self.info(name).times
        return tuple(Frame(name, int(i), float(times[i])) for i in indices)

    def grid(self, name: str) -> tuple[int, int]:
        """The (height, width) of a video's frames in patches, after resizing.

        Raises:
            VideoError: the video is unreadable, or its frames are too long and thin.
        """
        info = self.info(name)
        patch = self.config.vision.patch_size
        factor = patch * self.config.vision.spatial_merge_size
        limits = (self.settings.min_pixels, self.settings.max_pixels)
        try:
            height, width = smart_resize(info.height, info.width, *limits, factor)
        except ValueError as error:
            # The frames are too long and thin.
            raise VideoError(self.root / name, str(error)) from error
        limit = frame_tokens(self.settings, self.config.vision)
        if height * width > limit * factor**2:
            raise VideoError(
                self.root / name,
                f"its frames of {info.width} x {info.height} pixels are too long and thin: they "
                f"need {height * width // factor**2} visual tokens, and frames.max_pixels = "
                f"{self.settings.max_pixels} allows {limit}",
            )
        return height // patch, width // patch

    def tokens(self, name: str) -> int:
        """Visual tokens per frame of this video."""
        height, width = self.grid(name)
        return height * width // self.config.vision.spatial_merge_size**2

    def forget(self, name: str) -> None:
        """Drops everything known about a video."""
        self._infos.pop(name, None)
        self._contents.pop(name, None)
        self.unreadable.pop(name, None)
        for key in [key for key in self._store if key[0] == name]:
            self._drop(key)
        self._frames_in_store.pop(name, None)

    def key(self, frame: Frame) -> tuple:
        """The cache key: everything that a frame's features depend on."""
        return (
            frame.video,
            self._content(frame.video),
            frame.index,
            *self.grid(frame.video),
            self.version,
        )

    def __call__(self, frames: Sequence[Frame]) -> Shaped[np.ndarray, "m ..."]:
        keys = [self.key(frame) for frame in frames]
        # Per video, the indices of missing frames. A dict, as an ordered set.
        missing: dict[str, dict[int, None]] = {}
        for frame, key in zip(frames, keys, strict=True):
            if key not in self._store:
                missing.setdefault(frame.video, {})[frame.index] = None
        fresh: dict[tuple, np.ndarray] = {}
        for name, wanted in missing.items():
            try:
                fresh |= self._encode_video(name, list(wanted))
            except VideoError as error:
                self.unreadable[name] = error.reason
                raise
        for key in keys:
            if key in self._store:
                self._store.move_to_end(key)
        # Collected before the new frames are stored, since storing them may evict the old ones.
        rows = [fresh[key] if key in fresh else self._store[key] for key in keys]
        self._remember(fresh)
        return np.concatenate(rows)

    def _encode_video(self, name: str, wanted: list[int]) -> dict[tuple, np.ndarray]:
        """Reads and encodes frames of one video.

        Batches never mix videos, so that features do not depend on what else was asked for.
        """
        grid = self.grid(name)
        count = self.info(name).frames
        if not 0 <= min(wanted) <= max(wanted) < count:
            raise VideoError(
                self.root / name,
                f"it has {count} frames, {min(wanted)} to {max(wanted)} were asked for",
            )
        indices = list(range(count)) if count <= self.settings.whole_frames else wanted
        patch = self.config.vision.patch_size
        size = (grid[0] * patch, grid[1] * patch)
        try:
            pixels = [resize(frame, size) for frame in self.source.read(self.root / name, indices)]
        except IndexError as error:
            raise VideoError(
                self.root / name, f"it had {count} frames and has changed since"
            ) from error
        self.encoded_frames += len(indices)
        # A key does not depend on the timestamp.
        keys = [self.key(Frame(name, i, 0.0)) for i in indices]
        return dict(zip(keys, self._vectors(pixels, grid), strict=True))

    def _vectors(
        self, pixels: Sequence[UInt8[np.ndarray, "h w 3"]], grid: tuple[int, int]
    ) -> list[Shaped[np.ndarray, "tokens ..."]]:
        """Features of frames of equal size, one array [tokens, c, d] per frame.

        A subclass may cache something else per visual token.
        """
        config = self.config.vision
        batch = self.settings.batch
        layout = frame_layout(grid, config)
        vectors = []
        for first in range(0, len(pixels), batch):
            part = pixels[first : first + batch]
            # The last batch is padded with black frames: the tower is compiled for one batch size.
            frames = np.zeros((batch, *pixels[0].shape), np.uint8)
            frames[: len(part)] = part
            patches = patchify(frames, config.patch_size, config.spatial_merge_size)
            features = np.asarray(self._encode(self._weights, patches, layout), np.float32)
            vectors += list(features[: len(part)])
        return vectors

    def _remember(self, fresh: dict[tuple, np.ndarray]) -> None:
        for key, row in fresh.items():
            if key in self._store:
                self._drop(key)
            self._frames_in_store[key[0]] += 1
            # A copy: a view would keep the features of the whole batch in memory.
            self._store[key] = row.copy()
            self.cached_bytes += row.nbytes
        while self.cached_bytes > self.settings.cache_mib * 2**20:
            self._drop(next(iter(self._store)))

    def _drop(self, key: tuple) -> None:
        self.cached_bytes -= self._store.pop(key).nbytes
        self._frames_in_store[key[0]] -= 1
