"""Visual features of video frames, computed once per frame and cached.

Overview, crops, sampler and training step all get features here. As far as the vision tower is
frozen, a frame's features depend only on the video's content, the frame index, the size and the
tower's version: these are the cache key. A file's length and modification time stand for its
content, so a new file under an old name counts as another video. For an unreadable video every
method raises `VideoError`.

If a part of the tower is trained (`models.trained_vision`), what is cached is the input of
that part. Visual vectors, which samplers read, are computed from it and kept until other weights
are loaded.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Shaped, UInt8

from models.config import ModelConfig, VisionConfig
from models.fingerprint import fingerprint
from models.patches import patchify
from models.sharding import Lowering, make_mesh
from models.trained import VISION
from models.trained_vision import TrainedVision, cached_shape
from models.vision import PatchLayout, VisionTower, frame_layout
from paravt_jax.data.frames import (
    FrameSource,
    ReadFrames,
    ReadTask,
    VideoError,
    VideoInfo,
    join,
    overview_indices,
    window_indices,
)
from paravt_jax.data.sizes import FrameRules, PixelRules
from paravt_jax.method.records import Frame

# Videos whose timestamps are kept: 8 bytes per frame, about 100 kB for five minutes.
_MAX_INFOS = 1024

# qwen_vl_utils resizes to multiples of this many pixels, two patches of Qwen2-VL.
_CLIENT_FACTOR = 28

# Last in the keys of visual vectors that depend on trained weights.
_CURRENT = "current"

_FRAMES_PER_STEP = 64  # frames that count as one step of the sampler

_SMALL_FRAME = 49  # visual tokens of the largest frame by default


@dataclasses.dataclass(frozen=True)
class FrameSettings:
    """How frames are resized (REFERENCE 3, step 5), encoded and cached."""

    min_pixels: int = 784
    """Smaller frames are enlarged to this area, in pixels."""
    max_pixels: int = 50_176
    """Larger frames are shrunk to this area, in pixels."""
    crop_min_pixels: int = 0
    """Replaces min_pixels for the frames of crops; 0: the same."""
    crop_max_pixels: int = 0
    """Replaces max_pixels for the frames of crops; 0: the same."""
    snap: int = 0
    """28: resize to multiples of 28 first, as clients of Qwen's servers do; 0: not at all."""
    jpeg: int = 0
    """Quality of the JPEG through which resized frames go, from 1 to 100; 0: none."""
    processor_min_pixels: int = 0
    """Resized frames below this area are enlarged, as the model's processor does; 0: no."""
    batch: int = 16
    """Frames of up to 49 visual tokens per call of the vision tower; fewer if larger."""
    whole_frames: int = 0
    """Videos of at most this many frames are encoded whole on first use."""
    cache_mib: int = 4096
    """Size limit of the feature cache, in MiB. Frames of running episodes may exceed it."""
    admission: Literal["arrival", "counted"] = "arrival"
    """When frames join an episode: on arrival, or, to repeat bit for bit, after counted steps."""

    def __post_init__(self):
        for name in ("min_pixels", "batch"):
            self._require_at_least(1, name)
        for name in (
            "crop_min_pixels",
            "crop_max_pixels",
            "processor_min_pixels",
            "whole_frames",
            "cache_mib",
        ):
            self._require_at_least(0, name)
        self._check_limits()
        if self.admission not in ("arrival", "counted"):
            raise ValueError(f"frames.admission: {self.admission!r}; give arrival or counted")
        if self.snap not in (0, _CLIENT_FACTOR):
            raise ValueError(
                f"frames.snap: {self.snap}; give {_CLIENT_FACTOR}, or 0 for no such step"
            )
        if not 0 <= self.jpeg <= 100:
            raise ValueError(
                f"frames.jpeg: {self.jpeg}; give a quality from 1 to 100, or 0 for no JPEG"
            )

    def _require_at_least(self, least: int, name: str) -> None:
        if getattr(self, name) < least:
            raise ValueError(
                f"frames.{name}: {getattr(self, name)}; give a whole number of at least {least}"
            )

    def _check_limits(self) -> None:
        if self.max_pixels < self.min_pixels:
            raise ValueError(
                f"frames.max_pixels: {self.max_pixels}; give at least frames.min_pixels = "
                f"{self.min_pixels}"
            )
        least = self.crop_min_pixels or self.min_pixels
        most = self.crop_max_pixels or self.max_pixels
        if most < least:
            raise ValueError(
                f"frames.crop_max_pixels, frames.crop_min_pixels: crops have at least {least} and "
                f"at most {most} pixels; raise the one or lower the other"
            )

    def batch_of(self, tokens: int) -> int:
        """Frames per call of the vision tower if each has this many visual tokens.

        A call has about as many tokens with large frames as with small ones. A partly filled call
        costs the same as a full one.
        """
        return max(1, self.batch * _SMALL_FRAME // max(_SMALL_FRAME, tokens))

    def rules(self, vision: VisionConfig, crop: bool = False) -> PixelRules:
        """How a frame of an overview, or of a crop, becomes what the tower reads."""
        return PixelRules(
            min_pixels=crop and self.crop_min_pixels or self.min_pixels,
            max_pixels=crop and self.crop_max_pixels or self.max_pixels,
            factor=vision.patch_size * vision.spatial_merge_size,
            snap=self.snap,
            jpeg=self.jpeg,
            processor_min_pixels=self.processor_min_pixels,
        )


def frame_tokens(settings: FrameSettings, vision: VisionConfig, crop: bool = False) -> int:
    """Upper bound on the visual tokens of a frame. Very wide frames that exceed it are refused."""
    return settings.rules(vision, crop).most_tokens


def _all(tower: VisionTower, patches: Any, layout: PatchLayout) -> jax.Array:
    return tower(patches, layout)


def _before_mergers(tower: VisionTower, patches: Any, layout: PatchLayout) -> jax.Array:
    return tower.before_mergers(patches, layout)


def _mergers(tower: VisionTower, states: Any, _: PatchLayout) -> jax.Array:
    return tower.mergers.of_tokens(states)


def tower_program(
    graph: nnx.GraphDef, mesh: Mesh, part: Callable[..., jax.Array] = _all
) -> jax.stages.Wrapped:
    """The vision tower on frames of one size: `program(weights, patches, layout)`, jitted.

    Frames are split over the devices of the mesh, each of which has all weights.

    Args:
        graph: the tower without its weights.
        mesh: the mesh, from `tower_mesh`.
        part: what is computed: `f(tower, frames, layout)`.
    """

    def encode_frames(weights: Any, frames: Any, layout: Any) -> jax.Array:
        return part(nnx.merge(graph, weights), frames, layout)

    # The weights are an argument: closed over, they would be compiled into the program.
    if mesh.size == 1:
        return jax.jit(encode_frames)
    whole, by_frame = PartitionSpec(), PartitionSpec("data")
    specs = (whole, by_frame, whole)
    # The compiler cannot shard attention kernels. Here each device runs its own.
    split = jax.shard_map(
        encode_frames, mesh=mesh, in_specs=specs, out_specs=by_frame, check_vma=False
    )
    return jax.jit(split)


def frames_per_call(settings: FrameSettings, tokens: int, devices: int) -> int:
    """Frames per call of the tower if each has this many visual tokens, equally many per device."""
    return math.ceil(settings.batch_of(tokens) / devices) * devices


def tower_mesh(devices: Sequence[Any]) -> Mesh:
    """The mesh over which frames are split."""
    return make_mesh(data=len(devices), devices=devices)


class Encoded(NamedTuple):
    """Features of one frame, or of a pair: a row of what the tower returned for a batch of them.

    The batch may still be on the devices, and not computed yet.
    """

    batch: jax.Array | Shaped[np.ndarray, "m tokens ..."]
    row: int

    def fetch(self) -> Shaped[np.ndarray, "tokens ..."]:
        """Wait for the features."""
        # A copy: a view would keep the features of the whole batch in memory.
        return np.asarray(self.batch)[self.row].copy()


class _Read(NamedTuple):
    """A file that is being read."""

    content: tuple[int, int] | None
    future: Future[ReadFrames]


@dataclasses.dataclass(frozen=True)
class ShownFrames:
    """Frames, and what is cached of each. This stays in memory for as long as somebody holds it."""

    frames: tuple[Frame, ...]
    cached: tuple[Shaped[np.ndarray, "..."], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    """Frames whose files are being read. An agent awaits it, and gets `ShownFrames`.

    `await` hands this object to the scheduler (`rollout.engine.requests`), which resumes the agent
    when the files have been read. Then it raises VideoError if one of them cannot be read.
    """

    features: FrameFeatures
    choose: Callable[[], tuple[Frame, ...]]
    """The frames, once the length of their video is known."""
    count: int
    """Number of the frames."""
    held: dict[tuple, np.ndarray]
    """What was in memory from the start."""
    reads: Mapping[tuple[str, FrameRules], _Read]
    """What is read, per video and kind of frame."""

    @property
    def steps(self) -> int | None:
        """Steps of the sampler after which the agent goes on; None: when the files are read.

        This must not depend on what is in memory: a run that was killed begins with nothing.
        """
        if self.features.settings.admission == "arrival":
            return None
        return max(1, math.ceil(self.count / _FRAMES_PER_STEP))

    def done(self) -> bool:
        """Whether all files have been read, or cannot be read."""
        return all(read.future.done() for read in self.reads.values())

    def result(self) -> ShownFrames:
        """Wait for the files, and encode their frames."""
        return self.features.take(self)

    def __await__(self) -> Generator[Reading, None, ShownFrames]:
        yield self
        return self.result()


def wait_for_one(readings: Sequence[Reading]) -> None:
    """Wait until one of some readings is done."""
    features = readings[0].features
    start = time.perf_counter()
    while not any(reading.done() for reading in readings):
        futures = [read.future for reading in readings for read in reading.reads.values()]
        wait([future for future in futures if not future.done()], return_when=FIRST_COMPLETED)
    features.waited += time.perf_counter() - start


class FrameFeatures:
    """A cache of frame features in front of a vision tower.

    Calling it with frames returns features [tokens, c, d]: the visual tokens of all frames in
    order, with c = 1 + DeepStack levels. They are a NumPy array in `dtype`, the type in which the
    tower computes (bfloat16 is that of ml_dtypes), and are never converted. The least recently used
    frames leave the cache first.

    Nothing here waits for a file if an agent awaits `request` before, and holds what it gets.

    A batch of frames is split over all devices that hold the tower's weights.

    Args:
        tower: the vision tower; None for a subclass that does not need it.
        config: the model's sizes.
        settings: sizes of frames and of the cache.
        root: folder of the videos, or its address (gs://...). Videos are named by their path
            relative to it. Files behind addresses must not change.
        source: reads the videos.
        version: version of the tower's frozen weights.
        trained: the part of the tower that is trained; None: none is.
    """

    def __init__(
        self,
        tower: VisionTower | None,
        config: ModelConfig,
        settings: FrameSettings,
        root: str | os.PathLike,
        source: FrameSource,
        version: int = 0,
        trained: TrainedVision | None = None,
    ):
        self.config = config
        self.settings = settings
        # Type of the features.
        self.dtype = np.dtype(np.float32)
        self.root = root
        self.source = source
        self.version = version
        self.trained = trained
        # Videos that could not be read, with the reason.
        self.unreadable: dict[str, str] = {}
        self.encoded_frames = 0
        # Seconds in which the caller waited for files.
        self.waited = 0.0
        if tower is not None:
            self.dtype = np.dtype(tower.dtype)
            graph, weights = nnx.split(tower)
            self._mesh = tower_mesh(list(jax.tree.leaves(weights)[0].sharding.device_set))
            self._weights = jax.device_put(weights, NamedSharding(self._mesh, PartitionSpec()))
            first = _all if trained is None else _before_mergers
            self._encode = tower_program(graph, self._mesh, first)
            if trained is not None:
                self._finish = tower_program(graph, self._mesh, _all if trained.whole else _mergers)
        # Names of the weights that `load` replaces.
        self._loaded: tuple[str, ...] = ()
        # Frames that `start` has begun to encode.
        self._started: dict[tuple, Encoded] = {}
        # Both ordered dictionaries have the least recently used entry first.
        self._store: collections.OrderedDict[tuple, np.ndarray] = collections.OrderedDict()
        self.cached_bytes = 0
        # Features that somebody holds or that are in the store. Nothing is evicted from here.
        self._alive: weakref.WeakValueDictionary[tuple, np.ndarray] = weakref.WeakValueDictionary()
        # Files that somebody waits for.
        self._reads: weakref.WeakValueDictionary[tuple, Future[ReadFrames]] = (
            weakref.WeakValueDictionary()
        )
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
        if not self._knows(name):
            read = self._submit(name, (), self.settings.rules(self.config.vision))
            self._learn(name, content, self.wait(read.future).info)
        self._infos.move_to_end(name)
        return self._infos[name][1]

    def _knows(self, name: str) -> bool:
        return name in self._infos and self._infos[name][0] == self._content(name)

    def _learn(self, name: str, content: tuple[int, int] | None, info: VideoInfo) -> None:
        self._infos[name] = (content, info)
        self._infos.move_to_end(name)
        if len(self._infos) > _MAX_INFOS:
            self._drop_oldest_info(keep=name)

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
        usable. None for a file that never existed, or that is behind an address.
        """
        # ValueError: the name contains a NUL.
        with contextlib.suppress(OSError, ValueError):
            stat = os.stat(join(self.root, name))
            self._contents[name] = (stat.st_size, stat.st_mtime_ns)
        return self._contents.get(name)

    def overview(self, name: str, count: int) -> tuple[Frame, ...]:
        """`count` frames spread evenly over the whole video."""
        return self._frames(name, overview_indices(self.info(name).frames, count))

    def window(
        self, name: str, start: float, end: float, fps: float, limit: int
    ) -> tuple[Frame, ...]:
        """At most `limit` frames of the window [start, end] in seconds, at `fps`."""
        indices = window_indices(self.info(name), start, end, fps, limit)
        return self._frames(name, indices, crop=True)

    def _frames(self, name: str, indices: np.ndarray, crop: bool = False) -> tuple[Frame, ...]:
        times = self.info(name).times
        return tuple(Frame(name, int(i), float(times[i]), crop) for i in indices)

    def grid(self, frame: Frame | str) -> tuple[int, int]:
        """The (height, width) of a frame in patches, after resizing.

        Args:
            frame: a frame, or a video's name for the frames of its overview.

        Raises:
            VideoError: the video is unreadable, or its frames are too long and thin.
        """
        if isinstance(frame, str):
            frame = Frame(frame, 0, 0.0)
        info = self.info(frame.video)
        try:
            return self._grid(info.height, info.width, self._rules(frame))
        except ValueError as error:
            raise VideoError(join(self.root, frame.video), str(error)) from error

    def _grid(self, height: int, width: int, rules: FrameRules) -> tuple[int, int]:
        """The grid of frames of these sizes in pixels; ValueError if they are too long and thin."""
        resized = rules.sizes(height, width)[-1]
        tokens = math.prod(resized) // rules.factor**2
        if tokens > rules.most_tokens:
            raise ValueError(
                f"its frames of {width} x {height} pixels are too long and thin: they "
                f"need {tokens} visual tokens, and the limit on their pixels (frames.max_pixels) "
                f"allows {rules.most_tokens}"
            )
        patch = self.config.vision.patch_size
        return resized[0] // patch, resized[1] // patch

    def tokens(self, frame: Frame | str) -> int:
        """Visual tokens of a frame, or of each frame of a video's overview."""
        height, width = self.grid(frame)
        return height * width // self.config.vision.spatial_merge_size**2

    def _rules(self, frame: Frame) -> FrameRules:
        return frame.rules or self.settings.rules(self.config.vision, frame.crop)

    def lowerings(self, sizes: Iterable[tuple[int, int]]) -> Iterator[Lowering]:
        """The tower's programs for videos of these sizes, for `models.compile_ahead`.

        They depend on the number of visual tokens that a frame of an overview or a crop can have.

        Args:
            sizes: (height, width) of videos, in pixels.
        """
        config = self.config.vision
        grids: dict[int, tuple[int, int]] = {}
        for height, width in sizes:
            for crop in (False, True):
                # Frames that are too long and thin are refused when they are asked for.
                with contextlib.suppress(ValueError):
                    grid = self._grid(height, width, self.settings.rules(config, crop))
                    grids.setdefault(math.prod(grid), grid)
        for patches, grid in grids.items():
            tokens = patches // config.spatial_merge_size**2
            batch = frames_per_call(self.settings, tokens, self._mesh.size)
            layout = frame_layout(grid, config)
            in_patches = (batch, patches, config.patch_dim)
            if self.trained is None or not self.trained.whole:
                frames = jax.ShapeDtypeStruct(in_patches, np.float32)
                yield functools.partial(self._encode.lower, self._weights, frames, layout)
            if self.trained is not None:
                shape = in_patches if self.trained.whole else (batch, tokens, *self.vector)
                cached = jax.ShapeDtypeStruct(shape, self.dtype)
                yield functools.partial(self._finish.lower, self._weights, cached, layout)

    def forget(self, name: str) -> None:
        """Drops everything known about a video."""
        self._infos.pop(name, None)
        self._contents.pop(name, None)
        self.unreadable.pop(name, None)
        for key in [key for key in self._store if key[0] == name]:
            self._drop(key)
        for key in [key for key in self._alive if key[0] == name]:
            del self._alive[key]
        for key in [key for key in self._started if key[0] == name]:
            del self._started[key]
        self._frames_in_store.pop(name, None)

    def key(self, frame: Frame) -> tuple:
        """The cache key: everything that a frame's features depend on."""
        return (
            frame.video,
            self._content(frame.video),
            frame.index,
            frame.second,
            *self.grid(frame),
            self._rules(frame),
            self.version,
        )

    @property
    def vector(self) -> tuple[int, int]:
        """The shape of what is cached per visual token."""
        if self.trained is None:
            return cached_shape(self.config.vision, "none")
        return self.trained.vector

    def load(self, weights: Any) -> None:
        """Replace the weights of the trained part, and forget what the old ones computed.

        Args:
            weights: the part's weights, from `vision.encoding_weights`, whole on each device of
                the tower. They are not copied.
        """
        self._weights = nnx.merge_state(self._weights, weights)
        self._loaded = tuple(weights)
        for key in [key for key in self._store if key[-1] == _CURRENT]:
            self._drop(key)
        for key in [key for key in self._alive if key[-1] == _CURRENT]:
            del self._alive[key]

    def fingerprint(self) -> int:
        """The fingerprint of the weights that `load` has replaced (`models.fingerprint`)."""
        loaded = {name: self._weights[name] for name in self._loaded}
        return fingerprint(nnx.State({VISION: loaded}))

    def __call__(self, frames: Sequence[Frame]) -> Shaped[np.ndarray, "m ..."]:
        if self.trained is None:
            return self.cached(frames)
        keys = [(*self.key(frame), _CURRENT) for frame in frames]
        found = self._in_memory(keys)
        # By video as well: features must not depend on what else was asked for.
        missing: dict[tuple, dict[tuple, Frame]] = {}
        for key, frame in zip(keys, frames, strict=True):
            if key not in found:
                missing.setdefault((frame.video, self.grid(frame)), {})[key] = frame
        fresh: dict[tuple, np.ndarray] = {}
        for (_, grid), wanted in missing.items():
            for key, vectors in zip(wanted, self._visual([*wanted.values()], grid), strict=True):
                fresh[key] = vectors
        self._remember(fresh)
        found |= fresh
        return np.concatenate([found[key] for key in keys])

    def _visual(
        self, frames: Sequence[Frame], grid: tuple[int, int]
    ) -> Iterator[Shaped[np.ndarray, "tokens ..."]]:
        """The visual vectors of frames of one size, under the current weights."""
        tokens = self.tokens(frames[0])
        size = frames_per_call(self.settings, tokens, self._mesh.size)
        for first in range(0, len(frames), size):
            part = frames[first : first + size]
            batch = np.zeros((size, tokens, *self.vector), self.dtype)
            batch[: len(part)] = self.cached(part).reshape(-1, *batch.shape[1:])
            if self.trained is not None and self.trained.whole:
                batch = batch.reshape(size, -1, self.config.vision.patch_dim)
            with jax.profiler.TraceAnnotation("vision"):
                vectors = self._finish(self._weights, batch, frame_layout(grid, self.config.vision))
            for row in range(len(part)):
                yield Encoded(vectors, row).fetch()

    def cached(self, frames: Sequence[Frame]) -> Shaped[np.ndarray, "m ..."]:
        """What is cached of frames, [tokens, c, w], which training reads.

        These are their visual vectors, unless a part of the tower is trained; then see
        `models.trained_vision`.
        """
        return np.concatenate(self.request(frames).result().cached)

    def request(self, frames: Sequence[Frame]) -> Reading:
        """Begin to read the frames that are not in memory, without waiting for their files.

        Raises:
            VideoError: the video has other frames.
        """
        frames = tuple(frames)
        keys = [self.key(frame) for frame in frames]
        held = self._in_memory(keys)
        reads = {}
        for kind, wanted in self._missing(frames, keys, held).items():
            with self._noting(kind[0]):
                reads[kind] = self._begin(wanted)
        return Reading(self, lambda: frames, len(frames), held, reads)

    def request_overview(self, name: str, count: int) -> Reading:
        """Begin to read the overview of a video, which may never have been opened before."""
        rules = self.settings.rules(self.config.vision)
        held: dict[tuple, np.ndarray] = {}
        if self._knows(name):
            frames = self.overview(name, count)
            keys = [self.key(frame) for frame in frames]
            held = self._in_memory(keys)
            if not self._missing(frames, keys, held):
                return Reading(self, lambda: frames, count, held, {})
        read = self._submit(name, count, rules)
        return Reading(self, lambda: self.overview(name, count), count, held, {(name, rules): read})

    def request_info(self, name: str) -> Reading:
        """Begin to list the frames of a video. None of them is read."""
        rules = self.settings.rules(self.config.vision)
        reads: dict[tuple[str, FrameRules], _Read] = {}
        if not self._knows(name):
            reads[name, rules] = self._submit(name, (), rules)
        return Reading(self, tuple, 0, {}, reads)

    def take(self, reading: Reading) -> ShownFrames:
        """Encode frames whose files have been read.

        Raises:
            VideoError: a file cannot be read.
        """
        for (name, _), (content, future) in reading.reads.items():
            with self._noting(name):
                self._learn(name, content, self.wait(future).info)
        frames = reading.choose()
        keys = [self.key(frame) for frame in frames]
        found = reading.held | self._in_memory(keys)
        fresh: dict[tuple, np.ndarray] = {}
        for kind, wanted in self._missing(frames, keys, found).items():
            with self._noting(kind[0]):
                _, future = reading.reads.get(kind) or self._begin(wanted)
                # One batch after the other, so that the devices never hold all of them.
                for key, encoded in self._encode_video(wanted, self.wait(future)):
                    fresh[key] = encoded.fetch()
        self._remember(fresh)
        found |= fresh
        return ShownFrames(frames, tuple(found[key] for key in keys))

    def wait(self, future: Future[ReadFrames]) -> ReadFrames:
        """The frames of a file. Raises VideoError if it cannot be read."""
        start = time.perf_counter()
        try:
            return future.result()
        finally:
            self.waited += time.perf_counter() - start

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        """Note the reason if a video turns out to be unreadable."""
        try:
            yield
        except VideoError as error:
            self.unreadable[name] = error.reason
            raise

    def start(self, frames: Sequence[Frame]) -> None:
        """Read frames and begin to encode them, without waiting for the devices.

        A later call with these frames takes the results, which are on the devices until then. Those
        that no call has taken go into the cache at the next `start`. Frames that cannot be read are
        left to the later call, which raises the error.
        """
        self._remember({key: encoded.fetch() for key, encoded in self._started.items()})
        self._started = {}
        readable: dict[tuple, Frame] = {}
        for frame in frames:
            with contextlib.suppress(VideoError):
                readable[self.key(frame)] = frame
        found = self._in_memory(readable)
        reads = []
        for wanted in self._missing([*readable.values()], [*readable], found).values():
            with contextlib.suppress(VideoError):
                reads.append((wanted, self._begin(wanted)))
        for wanted, (_, future) in reads:
            with contextlib.suppress(VideoError):
                self._started |= dict(self._encode_video(wanted, self.wait(future)))

    def _in_memory(self, keys: Iterable[tuple]) -> dict[tuple, np.ndarray]:
        """The features of those frames that are in memory."""
        found = {}
        fresh = {}
        for key in dict.fromkeys(keys):
            if key in self._started:
                fresh[key] = self._started.pop(key).fetch()
            elif key in self._alive:
                found[key] = self._alive[key]
                if key in self._store:
                    self._store.move_to_end(key)
        self._remember(fresh)
        return found | fresh

    def _missing(
        self, frames: Sequence[Frame], keys: Sequence[tuple], found: Mapping[tuple, np.ndarray]
    ) -> dict[tuple[str, FrameRules], list[Frame]]:
        """The frames that are not in `found`, per video and kind of frame."""
        missing: dict[tuple[str, FrameRules], dict[tuple, Frame]] = {}
        for frame, key in zip(frames, keys, strict=True):
            if key not in found:
                kind = (frame.video, self._rules(frame))
                missing.setdefault(kind, {})[key] = frame
        return {kind: [*wanted.values()] for kind, wanted in missing.items()}

    def _begin(self, wanted: Sequence[Frame]) -> _Read:
        """Begin to read frames of one video and of one kind."""
        name = wanted[0].video
        count = self.info(name).frames
        indices = [i for frame in wanted for i in frame.indices]
        if not 0 <= min(indices) <= max(indices) < count:
            raise VideoError(
                join(self.root, name),
                f"it has {count} frames, {min(indices)} to {max(indices)} were asked for",
            )
        indices = [i for frame in self._batched_with(wanted) for i in frame.indices]
        return self._submit(name, tuple(indices), self._rules(wanted[0]))

    def _submit(self, name: str, wanted: tuple[int, ...] | int, rules: FrameRules) -> _Read:
        """Begin to read a file, unless somebody waits for the very same frames."""
        task = ReadTask(str(join(self.root, name)), wanted, rules, self.settings.whole_frames)
        content = self._content(name)
        future = self._reads.get((content, task))
        if future is None:
            future = self.source.request(task)
            self._reads[content, task] = future
        return _Read(content, future)

    def _batched_with(self, wanted: Sequence[Frame]) -> Sequence[Frame]:
        """The frames that are encoded if some of one video and one kind are missing."""
        first = wanted[0]
        count = self.info(first.video).frames
        if count > self.settings.whole_frames or first.second is not None:
            return wanted
        # A key does not depend on the timestamp.
        return [Frame(first.video, i, 0.0, first.crop) for i in range(count)]

    def _encode_video(
        self, wanted: Sequence[Frame], read: ReadFrames
    ) -> Iterator[tuple[tuple, Encoded]]:
        """Encode frames of one video and of one kind, each with its key.

        Batches never mix videos, so that features do not depend on what else was asked for.
        """
        first = wanted[0]
        grid = self.grid(first)
        wanted = self._batched_with(wanted)
        rows = {index: row for row, index in enumerate(read.indices)}
        indices = [i for frame in wanted for i in frame.indices]
        if not rows.keys() >= set(indices):
            count = self.info(first.video).frames
            raise VideoError(
                join(self.root, first.video), f"it had {count} frames and has changed since"
            )
        self.encoded_frames += len(indices)
        pixels = read.frames[[rows[i] for i in indices]]
        pixels = pixels.reshape(len(wanted), -1, *pixels.shape[1:])
        keys = [self.key(frame) for frame in wanted]
        yield from zip(keys, self._vectors(pixels, grid), strict=True)

    def _vectors(
        self, pixels: UInt8[np.ndarray, "m k h w 3"], grid: tuple[int, int]
    ) -> Iterator[Encoded]:
        """Encode m frames of equal size (k = 1) or pairs of them (k = 2), batch after batch.

        A subclass may cache something else per visual token.
        """
        config = self.config.vision
        tokens = grid[0] * grid[1] // config.spatial_merge_size**2
        batch = frames_per_call(self.settings, tokens, self._mesh.size)
        layout = frame_layout(grid, config)
        for first in range(0, len(pixels), batch):
            part = pixels[first : first + batch]
            # The last batch is padded with black frames: the tower is compiled for one batch size.
            frames = np.zeros((batch, *pixels.shape[1:]), np.uint8)
            frames[: len(part)] = part
            video = pixels.shape[1] > 1
            patches = patchify(frames.reshape(-1, *frames.shape[2:]), config, video)
            if self.trained is not None and self.trained.whole:
                features = patches.astype(self.dtype).reshape(batch, tokens, *self.vector)
            else:
                with jax.profiler.TraceAnnotation("vision"):
                    features = self._encode(self._weights, patches, layout)
                    features.copy_to_host_async()
            for row in range(len(part)):
                yield Encoded(features, row)

    def _remember(self, fresh: dict[tuple, np.ndarray]) -> None:
        for key, row in fresh.items():
            if key in self._store:
                self._drop(key)
            self._frames_in_store[key[0]] += 1
            self._store[key] = self._alive[key] = row
            self.cached_bytes += row.nbytes
        while self.cached_bytes > self.settings.cache_mib * 2**20:
            self._drop(next(iter(self._store)))

    def _drop(self, key: tuple) -> None:
        self.cached_bytes -= self._store.pop(key).nbytes
        self._frames_in_store[key[0]] -= 1
