"""The vision tower as jitted programs over batches of frames of one size.

    trained      `encode`: what is cached       `finish`: visual vectors
    none         the whole tower                (nothing to do)
    merger       the tower before its mergers   the mergers
    tower        (patches as they are)          the whole tower

See `models.trained` for what is cached in each case.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from models.vision import PatchLayout, VisionTower, frame_layout, patchify


def tower_mesh(devices: Sequence[Any]) -> Mesh:
    """Return the mesh over which frames are split."""
    return make_mesh(data=len(devices), devices=devices)


def tower_program(
    graph: nnx.GraphDef, mesh: Mesh, compute: Callable[..., jax.Array] = VisionTower.__call__
) -> jax.stages.Wrapped:
    """Return the vision tower on frames of one size: `program(weights, frames, layout)`, jitted.

    Frames are split over the devices of the mesh, each of which has all weights.

    Args:
        graph: The tower without its weights.
        mesh: The mesh, from `tower_mesh`.
        compute: What is computed: `compute(tower, frames, layout)`.
    """

    def encode_frames(weights: Any, frames: Any, layout: Any) -> jax.Array:
        return compute(nnx.merge(graph, weights), frames, layout)

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


def _mergers(tower: VisionTower, states: Any, _: PatchLayout) -> jax.Array:
    return tower.mergers.of_tokens(states)


def _tower_of_tokens(tower: VisionTower, patches: Any, layout: PatchLayout) -> jax.Array:
    """Run the tower on patches [m, tokens, 1, w], with those of a visual token side by side."""
    return tower(patches.reshape(len(patches), -1, tower.config.patch_dim), layout)


class FrameEncoder:
    """Encodes frames on all devices that hold the tower's weights.

    Args:
        tower: The vision tower.
        settings: Frames per call.
        trained: The part of the tower that is trained; None: none is.

    Attributes:
        version: How often `load` has replaced the weights of the trained part.
    """

    def __init__(
        self, tower: VisionTower, settings: FrameSettings, trained: TrainedVision | None = None
    ):
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
            pixels: m frames of equal size.
            grid: Their height and width in patches.
        """
        for count, batch in self._batches(pixels, grid):
            patches = patchify(batch, self._config)
            if self._encode is None:
                features = patches.astype(self._dtype).reshape(*self._batch_shape(grid), 1, -1)
            else:
                features = self._call(self._encode, patches, grid)
                features.copy_to_host_async()
            for index in range(count):
                yield Encoded(features, index)

    def finish(self, cached: Shaped[np.ndarray, "m tokens c w"], grid: Grid) -> Iterator[Encoded]:
        """Compute the visual vectors of frames from what is cached, under the current weights."""
        assert self._finish is not None, "no part of the tower is trained"
        for count, batch in self._batches(cached, grid):
            vectors = self._call(self._finish, batch, grid)
            for index in range(count):
                yield Encoded(vectors, index)

    def lowerings(self, grids: Iterable[Grid]) -> Iterator[Lowering]:
        """Return the programs for frames of these sizes in patches (`models.compilation`)."""
        for grid in grids:
            size, tokens = self._batch_shape(grid)
            layout = frame_layout(grid, self._config)
            if self._encode is not None:
                shape = (size, math.prod(grid), self._config.patch_dim)
                patches = jax.ShapeDtypeStruct(shape, np.float32)
                yield functools.partial(self._encode.lower, self._weights, patches, layout)
            if self._finish is not None and self._trained is not None:
                shape = (size, tokens, *self._trained.vector)
                cached = jax.ShapeDtypeStruct(shape, self._dtype)
                yield functools.partial(self._finish.lower, self._weights, cached, layout)

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
        with jax.profiler.TraceAnnotation("vision"):
            return program(self._weights, frames, frame_layout(grid, self._config))

    def _batches(self, frames: np.ndarray, grid: Grid) -> Iterator[tuple[int, np.ndarray]]:
        """Split frames into batches of the one size for which the programs are compiled.

        Yields:
            The number of frames in a batch, and the batch, padded with 0.
        """
        size, _ = self._batch_shape(grid)
        for first in range(0, len(frames), size):
            some = frames[first : first + size]
            batch = np.zeros((size, *frames.shape[1:]), frames.dtype)
            batch[: len(some)] = some
            yield len(some), batch

    def _batch_shape(self, grid: Grid) -> tuple[int, int]:
        """Return the frames per call for frames of this size, and the visual tokens of each."""
        tokens = math.prod(grid) // self._config.spatial_merge_size**2
        return self._settings.batch_of(tokens, self._mesh.size), tokens
