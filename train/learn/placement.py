"""Distributes batches over a mesh: shardings and micro-batches.

Rows are split over the axes `data` and `fsdp`. A packed row of RL may be cut into pieces, one per
device; each piece then counts as a row of its arrays.

Placement decides which device holds a value and never changes the value.
"""

from __future__ import annotations

import collections
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from models.qwen3_vl.config import TextConfig
from models.sharding import ROWS, constrain, row_devices

T = TypeVar("T")

# The axis of rows in each array of a batch, by the array's name. The bank of visual vectors of an
# RL step is split by its slots. Arrays that are not listed are replicated.
BY_ROW = MappingProxyType(
    {
        # PackedRows and Microbatch
        "ids": 0,
        "positions": 1,
        "segments": 0,
        "sampled": 0,
        "starts": 0,
        "shared": 0,
        "visual_index": 0,
        "visual": 0,
    }
)


def row_pieces(text: TextConfig, devices: int, tensor: int = 1) -> int:
    """The largest number of devices that can share a packed row: each computes some of its heads.

    Args:
        text: Sizes of the decoder.
        devices: Devices that rows are spread over.
        tensor: Size of the mesh axis `tensor`, which shards heads as well.
    """
    heads = text.num_attention_heads // tensor
    kv_heads = text.num_key_value_heads // tensor
    # Kv heads are divided, or repeated if there are fewer than pieces.
    fitting = [
        pieces
        for pieces in range(1, devices + 1)
        if devices % pieces == 0
        and heads % pieces == 0
        and (kv_heads % pieces == 0 or pieces % kv_heads == 0)
    ]
    return max(fitting)


def require_even(mesh: Mesh) -> None:
    """Raise ValueError, on every process, unless rows divide equally over the processes."""
    devices = collections.Counter(device.process_index for device in mesh.devices.flat)
    all_take_part = len(devices) == jax.process_count()
    equal = len(set(devices.values())) == 1
    if not all_take_part or not equal or row_devices(mesh) % len(devices):
        raise ValueError(
            f"mesh = {dict(mesh.shape)}: it takes {sorted(devices.values())} devices of the "
            f"{jax.process_count()} processes; use the same number of devices of each process, and "
            "make data * fsdp a multiple of the number of processes"
        )


def shardings(batch: T, mesh: Mesh) -> T:
    """The sharding of each array of a batch.

    Args:
        batch: A tree of `PackedRows`, `Microbatch`, `RLBatch` or the like, of real or abstract
            arrays.
        mesh: The mesh of training.

    Returns:
        The same tree with a NamedSharding in place of each array.
    """

    def of(path: tuple, _: Any) -> NamedSharding:
        name = _name(path)
        spec = PartitionSpec(*[None] * BY_ROW[name], ROWS) if name in BY_ROW else PartitionSpec()
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(of, batch)


def place(batch: T, mesh: Mesh) -> T:
    """Put this process's share of a batch on the mesh.

    An array contains this process's own rows, which are joined in the order of processes, or the
    full value of a replicated array.
    """

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))

    return jax.tree.map(put, batch, shardings(batch, mesh))


def place_whole(batch: T, mesh: Mesh) -> T:
    """Put a batch on the mesh of which every process has all rows."""

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])

    return jax.tree.map(put, batch, shardings(batch, mesh))


def split_microbatches(batch: T, parts: int) -> T:
    """Split `PackedRows` into micro-batches of whole rows.

    Every array gets a first axis of length `parts`. Runs inside jitted programs.
    """

    def split(path: tuple, leaf: np.ndarray | Array) -> Array:
        axis = BY_ROW[_name(path)]
        # [.., parts * n, ..] -> [.., parts, n, ..] -> [parts, .., n, ..]
        before, after = leaf.shape[:axis], leaf.shape[axis + 1 :]
        x = jnp.moveaxis(leaf.reshape(*before, parts, -1, *after), axis, 0)
        # Each device holds consecutive rows, so the first micro-batch would be on the first devices
        # only, and the others would wait. Spread every micro-batch over all devices.
        return constrain(x, *[None] * (axis + 1), ROWS)

    return jax.tree_util.tree_map_with_path(split, batch)


def _name(path: tuple) -> str:
    """The name of an array in a batch. All arrays of a `Structure` count as `structure`."""
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return "structure" if "structure" in names else names[-1]
