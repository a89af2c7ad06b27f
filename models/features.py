"""Frames in, visual vectors out, each frame once: what the overview, the crops, the sampler and the training step share.

Owns the bounded store of encoded frames and the reading of videos. The vision tower is frozen, so a frame's features and
DeepStack levels are a function of (content of the video, frame index, size, tower version) and that is the key; a file's content is
known by its name, length and time of change, so that another file under the name is met as another video. Refuses to answer for a
video that cannot be read: `VideoError` goes to the caller, who makes a value of it.
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
from jaxtyping import Float

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

_INFOS = 1024  # videos whose frames' times are kept: 8 bytes a frame, some 100 kB for five minutes


@dataclasses.dataclass(frozen=True)
class FrameSettings:
    """How frames are shown (REFERENCE 3, step 5), encoded and kept."""

    min_pixels: int = 784
    """Smaller frames are enlarged to this area, in pixels."""
    max_pixels: int = 50_176
    """Larger frames are shrunk to this area, in pixels."""
    batch: int = 16
    """Frames encoded in one call. A call with fewer costs as much, so take about as many as a crop has."""
    whole_frames: int = 0
    """Videos of at most this many frames are encoded whole when they are first met."""
    cache_mib: int = 4096
    """Bound on the encoded frames that are kept, in MiB."""

    def __post_init__(self):
        for name, least in (("min_pixels", 1), ("batch", 1), ("whole_frames", 0), ("cache_mib", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"frames.{name}: {getattr(self, name)}; give a whole number of at least {least}"
                )
        if self.max_pixels < self.min_pixels:
            raise ValueError(
                f"frames.max_pixels: {self.max_pixels}; give at least frames.min_pixels = {self.min_pixels}"
            )


def frame_tokens(settings: FrameSettings, vision: VisionConfig) -> int:
    """Visual tokens of one frame, at most. A frame that would need more (it is very wide) is not shown."""
    factor = vision.patch_size * vision.spatial_merge_size
    return max(1, settings.max_pixels // factor**2)


class FrameFeatures:
    """Encodes frames with a vision tower and remembers the results, least recently used first out. `source` reads them.

    Calling it with frames gives float32 [tokens, c, d]: the frames' merged tokens in order, c = features then DeepStack levels.
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
        self.config, self.settings, self.root, self.version, self.source = (
            config,
            settings,
            Path(root),
            version,
            source,
        )
        if tower is not None:  # None where `_vectors` needs none
            graph, self._weights = nnx.split(tower)
            self._encode = jax.jit(
                lambda weights, patches, layout: nnx.merge(graph, weights)(patches, layout)
            )
        self._store: collections.OrderedDict[tuple, np.ndarray] = collections.OrderedDict()
        self._held: collections.Counter[str] = (
            collections.Counter()
        )  # frames in the store, by video
        self._bytes = 0
        self._contents: dict[str, tuple[int, int]] = {}
        self._infos: collections.OrderedDict[str, tuple[tuple[int, int] | None, VideoInfo]] = (
            collections.OrderedDict()
        )
        self.unreadable: dict[str, str] = {}  # videos that opened and could not be decoded, and why
        self.encoded_frames = 0

    def info(self, name: str) -> VideoInfo:
        """Length and timestamps of a video, by its path relative to the root."""
        content = self._content(name)
        known = self._infos.get(name)
        if known is None or known[0] != content:
            known = self._infos[name] = content, self.source.probe(self.root / name)
            if (
                len(self._infos) > _INFOS
            ):  # what has frames here is still asked for, even where its file is gone
                oldest = next(
                    (old for old in self._infos if old != name and not self._held[old]), name
                )
                if oldest != name:
                    del self._infos[oldest]
        self._infos.move_to_end(name)
        return known[1]

    def _content(self, name: str) -> tuple[int, int] | None:
        """What tells a file's content from what stood there before: its length in bytes and when it was changed.

        Of a file that is gone, what was last seen, so that its frames serve as long as they are kept; None of one never seen.
        """
        with contextlib.suppress(OSError, ValueError):  # ValueError: a name with a NUL
            stat = os.stat(self.root / name)
            self._contents[name] = stat.st_size, stat.st_mtime_ns
        return self._contents.get(name)

    def overview(self, name: str, count: int) -> tuple[Frame, ...]:
        """`count` frames spread over the whole video."""
        return self._frames(name, overview_indices(self.info(name).frames, count))

    def window(
        self, name: str, start: float, end: float, fps: float, limit: int
    ) -> tuple[Frame, ...]:
        """At most `limit` frames at `fps` of the window [start, end], in seconds."""
        return self._frames(name, window_indices(self.info(name), start, end, fps, limit))

    def grid(self, name: str) -> tuple[int, int]:
        """The (height, width) of a video's frames in patches, after resizing.

        Raises VideoError for a video that cannot be read, or whose frames are too long and thin.
        """
        info, patch = self.info(name), self.config.vision.patch_size
        factor = patch * self.config.vision.spatial_merge_size
        try:
            limits = self.settings.min_pixels, self.settings.max_pixels
            height, width = smart_resize(info.height, info.width, *limits, factor)
        except ValueError as error:  # its frames are too long and thin to be shown
            raise VideoError(self.root / name, str(error)) from error
        most = frame_tokens(self.settings, self.config.vision)
        if height * width > most * factor**2:
            raise VideoError(
                self.root / name,
                f"its frames of {info.width} x {info.height} pixels are too long and thin: {height * width // factor**2} "
                f"visual tokens, and frames.max_pixels = {self.settings.max_pixels} allows {most}",
            )
        return height // patch, width // patch

    def tokens(self, name: str) -> int:
        """Visual tokens a frame of this video takes."""
        height, width = self.grid(name)
        return height * width // self.config.vision.spatial_merge_size**2

    def forget(self, name: str) -> None:
        """Drop all that is known of a video."""
        self._infos.pop(name, None)
        self._contents.pop(name, None)
        self.unreadable.pop(name, None)
        for key in [key for key in self._store if key[0] == name]:
            self._drop(key)
        self._held.pop(name, None)

    def _drop(self, key: tuple) -> None:
        self._bytes -= self._store.pop(key).nbytes
        self._held[key[0]] -= 1

    def __call__(self, frames: Sequence[Frame]) -> Float[np.ndarray, "m c d"]:
        keys = [self.key(frame) for frame in frames]
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
        rows = [fresh[key] if key in fresh else self._store[key] for key in keys]
        self._remember(fresh)
        return np.concatenate(rows)

    def _encode_video(self, name: str, wanted: list[int]) -> dict[tuple, np.ndarray]:
        """Read and encode frames of one video. Batches never mix videos: a frame's vectors do not depend on what else was asked for."""
        grid, count = self.grid(name), self.info(name).frames
        if not 0 <= min(wanted) <= max(wanted) < count:
            raise VideoError(
                self.root / name,
                f"it has {count} frames, {min(wanted)} to {max(wanted)} were asked for",
            )
        indices = list(range(count)) if count <= self.settings.whole_frames else wanted
        size = (grid[0] * self.config.vision.patch_size, grid[1] * self.config.vision.patch_size)
        try:
            pixels = [resize(frame, size) for frame in self.source.read(self.root / name, indices)]
        except IndexError as error:
            raise VideoError(
                self.root / name, f"it had {count} frames and has changed since"
            ) from error
        self.encoded_frames += len(indices)
        return {
            self.key(Frame(name, i, 0.0)): row
            for i, row in zip(indices, self._vectors(pixels, grid), strict=True)
        }

    def _vectors(self, pixels: Sequence[np.ndarray], grid: tuple[int, int]) -> list[np.ndarray]:
        """What is remembered of each of some frames of one size: [tokens, c, d]."""
        vectors, batch, layout = [], self.settings.batch, frame_layout(grid, self.config.vision)
        for first in range(0, len(pixels), batch):
            part = np.zeros((batch, *pixels[0].shape), np.uint8)
            part[: len(pixels) - first] = pixels[first : first + batch]
            patches = patchify(
                part, self.config.vision.patch_size, self.config.vision.spatial_merge_size
            )
            vectors += list(
                np.asarray(self._encode(self._weights, patches, layout), np.float32)[
                    : len(pixels) - first
                ]
            )
        return vectors

    def _remember(self, fresh: dict[tuple, np.ndarray]) -> None:
        for key, row in fresh.items():
            if key in self._store:
                self._drop(key)
            self._held[key[0]] += 1
            self._store[key] = row.copy()  # its own memory: a view would keep the whole batch alive
            self._bytes += row.nbytes
        while self._bytes > self.settings.cache_mib * 2**20:
            self._drop(next(iter(self._store)))

    def _frames(self, name: str, indices: np.ndarray) -> tuple[Frame, ...]:
        times = self.info(name).times
        return tuple(Frame(name, int(i), float(times[i])) for i in indices)

    def key(self, frame: Frame) -> tuple:
        """What a frame's vectors depend on."""
        return (
            frame.video,
            self._content(frame.video),
            frame.index,
            *self.grid(frame.video),
            self.version,
        )
