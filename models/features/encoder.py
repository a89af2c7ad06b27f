"""The vision tower as jitted programs over batches of frames, one per size of padded frames.

    trained      `encode`: what is cached       `finish`: visual vectors
    none         the whole tower                (nothing to do)
    merger       the tower before its mergers   the mergers
    tower        (patches as they are)          the whole tower

See `models.trained` for what is cached in each case.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Shaped, UInt8

from models.features.cache import Encoded, Grid
from models.features.reader import FrameSettings
from models.fingerprint import fingerprint
from models.sharding import Lowering, make_mesh
from models.trained import VISION, TrainedVision
from models.vision import VisionTower, patchify


def tower_mesh(devices: Sequence[Any]) -> Mesh:
    """Return the mesh over which frames are split."""
    return make_mesh(data=len(devices), devices=devices)


def tower_program(
    graph: nnx.GraphDef, mesh: Mesh, compute: Callable[..., jax.Array] = VisionTower.__call__
) -> jax.stages.Wrapped:
    """Return the vision tower on padded frames: `program(weights, frames, grids)`, jitted.

    Frames are split over the devices of the mesh, each of which has all weights.

    Args:
        graph: The tower without its weights.
        mesh: The mesh, from `tower_mesh`.
        compute: What is computed: `compute(tower, frames, grids)`.
    """

    def encode_frames(weights: Any, frames: Any, grids: Any) -> jax.Array:
        return compute(nnx.merge(graph, weights), frames, grids)

    # The weights are an argument: closed over, they would be compiled into the program.
    if mesh.size == 1:
        return jax.jit(encode_frames)
    whole, by_frame = PartitionSpec(), PartitionSpec("data")
    specs = (whole, by_frame, by_frame)
    # The compiler cannot shard attention kernels. Here each device runs its own.
    split = jax.shard_map(
        encode_frames, mesh=mesh, in_specs=specs, out_specs=by_frame, check_vma=False
    )
    return jax.jit(split)


def _mergers(tower: VisionTower, states: Any, _: Any) -> jax.Array:
    return tower.mergers.of_tokens(states)


def _tower_of_tokens(tower: VisionTower, patches: Any, grids: Any) -> jax.Array:
    """Run the tower on patches [m, tokens, 1, w], with those of a visual token side by side."""
    return tower(patches.reshape(len(patches), -1, tower.config.patch_dim), grids)


class FrameEncoder:
    """Encodes frames on all devices that hold the tower's weights.

    Args:
        tower: The vision tower.
        settings: Frames per call.
        trained: The part of the tower that is trained; None: none is.

    Attributes:
        sizes: Visual tokens to which frames are padded, ascending.
        version: How often `load` has replaced the weights of the trained part.
    """

    def __init__(
        self, tower: VisionTower, settings: FrameSettings, trained: TrainedVision | None = None
    ):
        self.sizes = settings.padded_sizes(tower.config)
        self.version = 0
        self._config = tower.config
        self._settings = settings
        self._trained = trained
        self._dtype = np.dtype(tower.dtype)
        # Names of the weights that `load` replaces.
        self._loaded: tuple[str, ...] = ()
        graph, weights = nnx.split(tower)
        self._mesh = tower_mesh(list(jax.tree.leaves(weights)[0].sharding.device_set))
        self._weights = jax.device_put(weights, NamedSharding(self._mesh, PartitionSpec()))
        self._encode: jax.stages.Wrapped | None = None
        self._finish: jax.stages.Wrapped | None = None
        if trained is None:
            self._encode = tower_program(graph, self._mesh)
        elif trained.whole:
            self._finish = tower_program(graph, self._mesh, _tower_of_tokens)
        else:
            self._encode = tower_program(graph, self._mesh, VisionTower.before_mergers)
            self._finish = tower_program(graph, self._mesh, _mergers)

    def encode(self, pixels: UInt8[np.ndarray, "m h w 3"], grid: Grid) -> Iterator[Encoded]:
        """Compute what is cached of frames, [tokens, c, w] each, batch after batch.

        Args:
            pixels: m frames of equal size; or frames that share a temporal patch, one below the
                other.
            grid: Height and width of a frame in patches.
        """
        tokens = self._tokens(grid)
        for some in self._batches(pixels, grid):
            height = grid[0] * self._config.patch_size
            frames = some.reshape(-1, height, *some.shape[2:])
            patches = patchify(frames, self._config, len(frames) // len(some))
            if self._encode is None:
                features = patches.astype(self._dtype).reshape(len(some), tokens, 1, -1)
            else:
                features = self._call(self._encode, patches, grid)
                features.copy_to_host_async()
            for index in range(len(some)):
                yield Encoded(features, index, tokens)

    def finish(self, cached: Shaped[np.ndarray, "m tokens c w"], grid: Grid) -> Iterator[Encoded]:
        """Compute the visual vectors of frames from what is cached, under the current weights."""
        assert self._finish is not None, "no part of the tower is trained"
        for some in self._batches(cached, grid):
            vectors = self._call(self._finish, some, grid)
            for index in range(len(some)):
                yield Encoded(vectors, index, self._tokens(grid))

    def lowerings(self) -> Iterator[Lowering]:
        """Return the programs for frames of all sizes, the largest first (`models.compilation`)."""
        for padded in reversed(self.sizes):
            size = self._settings.batch_of(padded, self._mesh.size)
            grids = np.zeros((size, 2), np.int32)
            if self._encode is not None:
                shape = (size, padded * self._config.spatial_merge_size**2, self._config.patch_dim)
                patches = jax.ShapeDtypeStruct(shape, np.float32)
                yield functools.partial(self._encode.lower, self._weights, patches, grids)
            if self._finish is not None and self._trained is not None:
                shape = (size, padded, *self._trained.vector)
                cached = jax.ShapeDtypeStruct(shape, self._dtype)
                yield functools.partial(self._finish.lower, self._weights, cached, grids)

    def load(self, weights: Any) -> None:
        """Replace the weights of the trained part.

        Args:
            weights: The part's weights, from `models.vision.encoding_weights`, whole on each device
                of the tower. They are not copied.
        """
        self._weights = nnx.merge_state(self._weights, weights)
        self._loaded = tuple(weights)
        self.version += 1

    def fingerprint(self) -> int:
        """Return the fingerprint of the weights that `load` has replaced."""
        loaded = {name: self._weights[name] for name in self._loaded}
        return fingerprint(nnx.State({VISION: loaded}))

    def _call(self, program: Callable, frames: np.ndarray, grid: Grid) -> jax.Array:
        """Call a program on at most a batch of frames, padded to the sizes that it has."""
        size, padded = self._call_shape(grid)
        m, length, *rest = frames.shape
        shape = (size, length * padded // self._tokens(grid), *rest)
        if frames.shape != shape:
            batch = np.zeros(shape, frames.dtype)
            batch[:m, :length] = frames
            frames = batch
        grids = np.zeros((size, 2), np.int32)
        grids[:m] = grid
        with jax.profiler.TraceAnnotation("vision"):
            return program(self._weights, frames, grids)

    def _batches(self, frames: np.ndarray, grid: Grid) -> Iterator[np.ndarray]:
        """Split frames into those of one call each."""
        size, _ = self._call_shape(grid)
        for first in range(0, len(frames), size):
            yield frames[first : first + size]

    def _call_shape(self, grid: Grid) -> tuple[int, int]:
        """Return the frames per call for frames of this size, and the tokens of each, padded."""
        padded = self.sizes[bisect.bisect_left(self.sizes, self._tokens(grid))]
        return self._settings.batch_of(padded, self._mesh.size), padded

    def _tokens(self, grid: Grid) -> int:
        return math.prod(grid) // self._config.spatial_merge_size**2
