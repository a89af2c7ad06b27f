"""Distributes batches over a mesh: shardings, micro-batches, and sums over replicas.

Rows are split over the axes `data` and `fsdp`. A packed row of RL may be cut into pieces, one per
device; each piece then counts as a row of its arrays.

Placement decides which device holds a value and never changes the value.

The mesh axis `data` counts replicas of the weights. Every TPU slice has one, since the network
between slices is slow. So each replica adds up the gradients of its own rows over all
micro-batches, and the sums of all replicas are added once, before the optimizer's step. To a
replica, its rows are a micro-batch of their own: losses, metrics and gradients of micro-batches add
up. With a single replica nothing here changes a program.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from models.config import TextConfig
from models.sharding import BATCH, MESH_AXES, ROWS, MeshProgram, row_devices
from models.trained import TrainedVision
from train.learn.batch import Microbatch
from train.learn.packing import VisualRoom

T = TypeVar("T")

REPLICAS = MESH_AXES[0]
_BY_REPLICA = PartitionSpec(REPLICAS)

Gradients = Callable[..., tuple[Any, dict[str, Array]]]

# The axis of rows in each array of a batch, by the array's name. Arrays that are not listed are
# replicated.
_BY_ROW = {"ids": 0, "positions": 1, "segments": 0, "starts": 0, "shared": 0, "visual_index": 0}


class Bank(NamedTuple):
    """What is cached of a step's frames, one slot per visual token, on the mesh of training."""

    cached: Shaped[Array, "b n c w"]
    """Rows split over devices: visual vectors, or the input of the trained part of the tower."""
    grids: Int[Array, "b f 2"] | None = None
    """If the whole tower is trained: height and width of a row's frames, in patches."""


def row_pieces(text: TextConfig, devices: int, tensor: int = 1) -> int:
    """Return the largest number of devices that can share a packed row: each computes some of its
    heads.

    Args:
        text: Sizes of the decoder.
        devices: Devices that rows are spread over.
        tensor: Size of the mesh axis `tensor`, which shards heads as well.
    """
    heads = text.num_attention_heads // tensor
    # Copies of kv heads included (`models.attention.spread`).
    kv_heads = math.lcm(text.num_key_value_heads, tensor) // tensor
    # Kv heads are divided, or repeated if there are fewer than pieces.
    fitting = [
        pieces
        for pieces in range(1, devices + 1)
        if devices % pieces == 0
        and heads % pieces == 0
        and (kv_heads % pieces == 0 or pieces % kv_heads == 0)
    ]
    return max(fitting)


def shardings(batch: T, mesh: Mesh) -> T:
    """Return the sharding of each array of a batch.

    Args:
        batch: A tree of `Microbatch`, `RLBatch` or the like, of real or abstract
            arrays.
        mesh: The mesh of training.

    Returns:
        The same tree with a NamedSharding in place of each array.
    """

    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        row_specs(batch, ROWS),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def row_specs(batch: T, axes: str | tuple[str, ...]) -> T:
    """Return the same tree with the spec that shards the rows of each array over mesh axes."""

    def of(path: tuple, _: Any) -> PartitionSpec:
        name = _name(path)
        return PartitionSpec(*[None] * _BY_ROW[name], axes) if name in _BY_ROW else PartitionSpec()

    return jax.tree_util.tree_map_with_path(of, batch)


def put(batch: T, mesh: Mesh, whole: bool = False) -> T:
    """Put a batch on the mesh.

    Args:
        batch: NumPy arrays.
        mesh: The mesh of training.
        whole: Whether every process has all rows. Otherwise each has its own, which are joined in
            the order of processes. Replicated arrays are whole in any case.
    """

    def shard(leaf: Any, sharding: NamedSharding) -> jax.Array:
        own = np.asarray(leaf)
        return jax.make_array_from_process_local_data(sharding, own, own.shape if whole else None)

    return jax.tree.map(shard, batch, shardings(batch, mesh))


def put_rows(rows: Shaped[np.ndarray, "..."], mesh: Mesh) -> Shaped[Array, "..."]:
    """Put an array on the mesh of which each process has its own rows."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh, BATCH), rows)


def put_vectors(
    rows: Sequence[Shaped[np.ndarray, "_ c d"]], room: int, mesh: Mesh
) -> Shaped[Array, "b m c d"]:
    """Put visual vectors on the mesh.

    Args:
        rows: This process's vectors, row by row; equally many rows per device and per process.
        room: The number m of vectors per row of the result. The last ones of a row may be 0.
        mesh: The mesh, over which rows are split.
    """
    padded = np.zeros((len(rows), room, *rows[0].shape[1:]), rows[0].dtype)
    for row, vectors in zip(padded, rows, strict=True):
        row[: len(vectors)] = vectors
    return put_rows(padded, mesh)


class BankPlacer:
    """Puts what is cached of this process's frames on the mesh of training.

    Args:
        mesh: The mesh.
        room: Room for the frames of a step.
        vision: The trained part of the vision tower; None: visual vectors are cached.
    """

    def __init__(self, mesh: Mesh, room: VisualRoom, vision: TrainedVision | None):
        self._mesh = mesh
        self._room = room
        self._vision = vision
        self._devices = row_devices(mesh) // jax.process_count()
        self._share = make_bank_share(mesh)

    def __call__(
        self, cached: Shaped[np.ndarray, "m c w"], grids: Sequence[tuple[int, int]]
    ) -> Bank:
        """Return the bank of a step.

        Args:
            cached: One entry per visual token, from the process's first slot on.
            grids: Height and width of this process's frames, in patches.
        """
        if self._vision is not None and self._vision.whole:
            return self._of_frames(cached, grids, self._vision)
        slots = self._room.slots
        firsts = range(0, slots * self._devices, slots)
        rows = [cached[first : first + slots] for first in firsts]
        bank = Bank(put_vectors(rows, slots, self._mesh))
        if self._vision is None and replicas(self._mesh) > 1:
            # Once per step: micro-batches read all of them.
            return Bank(self._share(bank.cached))
        return bank

    def _of_frames(
        self,
        cached: Shaped[np.ndarray, "m 1 w"],
        grids: Sequence[tuple[int, int]],
        vision: TrainedVision,
    ) -> Bank:
        """Return a bank of patches, of which every device gets equally many frames."""
        padded = vision.padded(cached, grids)
        share = math.ceil(len(grids) / self._devices)
        rows, sizes = [], np.zeros((self._devices, self._room.frames, 2), np.int32)
        for device in range(self._devices):
            own = slice(device * share, (device + 1) * share)
            rows.append(padded[own.start * vision.frame_tokens : own.stop * vision.frame_tokens])
            sizes[device, : len(grids[own])] = np.reshape(grids[own], (-1, 2))
        room = self._room.frames * vision.frame_tokens
        return Bank(put_vectors(rows, room, self._mesh), put_rows(sizes, self._mesh))


def _name(path: tuple) -> str:
    """Return the name of an array in a batch. All arrays of a `Structure` count as `structure`."""
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return "structure" if "structure" in names else names[-1]


# --- replicas of the weights ---


def replicas(mesh: Mesh) -> int:
    """Return the number of replicas of the weights."""
    return mesh.shape[REPLICAS]


def bank_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a step's visual vectors [rows, m, c, d]: every replica has all of
    them.

    Any row may need any vector, and none should cross between slices once per micro-batch.
    """
    axes = ROWS if replicas(mesh) == 1 else tuple(name for name in ROWS if name != REPLICAS)
    return NamedSharding(mesh, PartitionSpec(axes))


def make_bank_share(mesh: Mesh) -> MeshProgram:
    """Compile what gives every replica the visual vectors of all rows, once per step."""

    # Not a lambda: the log of compilations names functions.
    def share_bank(vectors: Array) -> Array:
        return vectors

    return MeshProgram(jax.jit(share_bank, out_shardings=bank_sharding(mesh)), mesh)


def sums_sharding(sharding: NamedSharding, mesh: Mesh) -> NamedSharding:
    """Return the sharding of gradients, given that of what they are of.

    Several replicas have a sum each: the first axis of gradients counts replicas.
    """
    if replicas(mesh) == 1:
        return sharding
    return NamedSharding(mesh, PartitionSpec(REPLICAS, *sharding.spec))


def sums_of(arrays: Any, mesh: Mesh) -> Any:
    """Return the gradients of arrays as abstract arrays, in float32."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
        shape = x.shape if replicas(mesh) == 1 else (replicas(mesh), *x.shape)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sums_sharding(x.sharding, mesh))

    return jax.tree.map(one, arrays)


def over_replicas(sums: Any, mesh: Mesh) -> Any:
    """Return the sums over replicas: the one reduction of an update.

    With several replicas, the first axis of `sums` counts them.
    """
    if replicas(mesh) == 1:
        return sums
    return jax.tree.map(lambda x: x.sum(0), sums)


def in_replicas(function: Gradients, mesh: Mesh) -> Gradients:
    """Run `function` in every replica, each with its own rows of the batch.

    Args:
        function: `f(arrays, sums, batch) -> (sums, metrics)`. Arrays are the same in all replicas,
            and `sums` may be None.
        mesh: The mesh.

    Returns:
        The same function for all rows. The first axis of its sums counts replicas. Its metrics are
        sums over replicas, or the maximum for `*_max`.
    """
    if replicas(mesh) == 1:
        return function

    def of_all(arrays: Any, sums: Any, batch: Any) -> tuple[Any, Any]:
        def local(arrays: Any, sums: Any, batch: Any, numbers: Any) -> tuple[Any, Any]:
            # [1, ...] -> [...], and back.
            sums, number = jax.tree.map(lambda x: x[0], (sums, numbers))
            batch = tuple(_in_replica(tree, number) for tree in batch)
            sums, metrics = function(arrays, sums, batch)
            return jax.tree.map(lambda x: x[None], sums), _of_all_replicas(metrics)

        return jax.shard_map(
            local,
            in_specs=(PartitionSpec(), _BY_REPLICA, row_specs(batch, REPLICAS), _BY_REPLICA),
            out_specs=(_BY_REPLICA, PartitionSpec()),
            axis_names={REPLICAS},
            check_vma=False,
        )(arrays, sums, batch, jnp.arange(replicas(mesh)))

    return of_all


def _of_all_replicas(metrics: Mapping[str, Array]) -> dict[str, Array]:
    """Return the metrics of all replicas, given those of one."""
    largest = {name: x for name, x in metrics.items() if name.endswith("_max")}
    added = {name: x for name, x in metrics.items() if name not in largest}
    return jax.lax.psum(added, REPLICAS) | jax.lax.pmax(largest, REPLICAS)


def _in_replica(tree: Any, number: Int[Array, ""]) -> Any:
    """Return a tree of a batch for the rows of a replica: it has no tokens of other replicas."""
    if not isinstance(tree, Microbatch):
        return tree
    own = tree.index - number * tree.ids.size
    index = jnp.where((own >= 0) & (own < tree.ids.size), own, -1)
    return dataclasses.replace(tree, index=index)
