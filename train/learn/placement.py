"""Distributes batches over a mesh: padding, shardings and micro-batches.

Rows are split over the axes `data` and `fsdp`, and so are prompts if each device gets at least one.
With fewer prompts, the neighbouring devices that hold the rows of a prompt also share the prompt:
each of them computes one piece of its length.

    device        0         1         2         3
    rows          r0 r1     r2 r3     r4 r5     r6 r7
    prompt        p0        p0        p1        p1       whole on each device of its group
    visual        p0 left   p0 right  p1 left   p1 right half the width of each vector
    computes      p0 [:s/2] p0 [s/2:] p1 [:s/2] p1 [s/2:]

Placement decides which device holds a value and never changes the value.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from models.sharding import ROWS, constrain, current_mesh, row_devices
from train.learn.batch import BatchShape

T = TypeVar("T")

# The axis of rows, or of prompts, in each array of a batch, by the array's name. Arrays in neither
# table are replicated.
BY_ROW = MappingProxyType(
    {
        # Sequences and PackedRows
        "ids": 0,
        "segments": 0,
        "sampled": 0,
        "logprobs": 0,
        "positions": 1,
        # GRPOBatch and RLBatch
        "mask": 0,
        "behaviour": 0,
        "reference": 0,
        "rollout": 0,
        "structure": 0,
        "advantages": 0,
    }
)
BY_PROMPT = MappingProxyType(
    {
        "prompt_ids": 0,
        "prompt_positions": 1,
        "prompt_segments": 0,
        "visual": 0,
    }
)


def parts_of(shapes: Sequence[BatchShape], devices: int, limit: int, processes: int = 1) -> int:
    """Number of micro-batches in which batches of `shapes` are computed.

    It is the smallest number whose micro-batches, padding included, are no larger than with
    `limit` of them: with small batches on many devices, a higher number would only add padding. It
    is raised if the groups of all micro-batches would not divide over the processes.

    Args:
        shapes: Shapes of the whole step's batches.
        devices: Devices that rows are split over.
        limit: Upper bound on micro-batches, as set by the user.
        processes: Number of processes.
    """
    parts = max(math.ceil(shape.groups / _groups(shape, devices, limit)) for shape in shapes)
    while any(_groups(shape, devices, parts) * parts % processes for shape in shapes):
        parts += 1
    return parts


def fitted(
    shapes: Sequence[BatchShape], limit: int, mesh: Mesh | None
) -> tuple[tuple[BatchShape, ...], int]:
    """The shapes padded for `mesh`, and the number of micro-batches by `parts_of`."""
    devices = 1
    processes = 1
    if mesh is not None:
        devices = row_devices(mesh)
        processes = len({device.process_index for device in mesh.devices.flat})
    parts = parts_of(shapes, devices, limit, processes)
    return tuple(fit(shape, devices, parts) for shape in shapes), parts


def fit(shape: BatchShape, devices: int, parts: int = 1) -> BatchShape:
    """Pad groups and prompt length so that every micro-batch divides evenly over the devices."""
    groups = _groups(shape, devices, parts)
    # Fewer prompts than devices: each prompt is computed in equal pieces.
    pieces = max(1, devices // groups)
    length = math.ceil(shape.prompt / pieces) * pieces
    return dataclasses.replace(shape, groups=groups * parts, prompt=length)


def _groups(shape: BatchShape, devices: int, parts: int) -> int:
    """Groups per micro-batch, padding included."""
    groups = math.ceil(shape.groups / parts)
    while not _divides(groups, shape.rows, devices):
        groups += 1
    return groups


def _divides(groups: int, rows: int, devices: int) -> bool:
    """Whether each device gets whole groups, or each group the same number of devices."""
    if groups % devices == 0:
        return True
    return devices % groups == 0 and groups * rows % devices == 0


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


def share_of_groups(shape: BatchShape) -> BatchShape:
    """One process's share of a batch; every process has the same number of whole groups."""
    processes = jax.process_count()
    if shape.groups % processes:
        raise ValueError(
            f"batch.groups: {shape.groups} per step, padding included; give a multiple of the "
            f"{processes} processes"
        )
    return dataclasses.replace(shape, groups=shape.groups // processes)


def prompt_pieces(prompts: int, rows: int, length: int) -> int:
    """Number of pieces in which each prompt is computed on the mesh that is set.

    With fewer prompts than devices it is the number of devices per prompt; else 1.

    Args:
        prompts: Prompts of the batch, or of a micro-batch.
        rows: Rows of the same.
        length: Length of a prompt in tokens, padding included.
    """
    mesh = current_mesh()
    devices = 1 if mesh is None else row_devices(mesh)
    if devices % prompts:
        return 1
    pieces = devices // prompts
    divides = rows % devices == 0 and length % pieces == 0
    return pieces if divides else 1


def shardings(batch: T, mesh: Mesh, processes: int = 1) -> T:
    """The sharding of each array of a batch.

    Args:
        batch: A tree of `Sequences`, `RLBatch`, `SFTBatch` or the like, of real or abstract arrays.
        mesh: The mesh of training.
        processes: Number of processes if `batch` is one process's share; 1 if it is a whole batch.

    Returns:
        The same tree with a NamedSharding in place of each array.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _sharding(path, leaf, mesh, processes), batch
    )


def place(batch: T, mesh: Mesh) -> T:
    """Put a batch on the mesh.

    A NumPy array contains this process's own rows or prompts, which are joined in the order of
    processes, or the full value of a replicated array. A JAX array is already on devices and is
    moved if necessary.
    """

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))

    return jax.tree.map(put, batch, shardings(batch, mesh, jax.process_count()))


def split_microbatches(batch: T, parts: int) -> T:
    """Split `Sequences` or `PackedRows` into micro-batches of whole groups or rows.

    Every array gets a first axis of length `parts`. Runs inside jitted programs.
    """
    mesh = current_mesh()

    def split(path: tuple, leaf: np.ndarray | Array) -> Array:
        name = _name(path)
        axis = (BY_ROW | BY_PROMPT)[name]
        # [.., parts * n, ..] -> [.., parts, n, ..] -> [parts, .., n, ..]
        before, after = leaf.shape[:axis], leaf.shape[axis + 1 :]
        x = jnp.moveaxis(leaf.reshape(*before, parts, -1, *after), axis, 0)
        # Each device holds consecutive rows, so the first micro-batch would be on the first devices
        # only, and the others would wait. Spread every micro-batch over all devices.
        prompts = leaf.shape[axis] // parts
        fewer_than_devices = (
            name in BY_PROMPT and mesh is not None and prompts % row_devices(mesh) > 0
        )
        if not fewer_than_devices:
            return constrain(x, *[None] * (axis + 1), ROWS)
        # Too few prompts to give each device one. Visual vectors, by far the largest array, are
        # split by their width instead.
        if name == "visual":
            return constrain(x, *[None] * (x.ndim - 1), ROWS)
        return x

    return jax.tree_util.tree_map_with_path(split, batch)


def _sharding(path: tuple, leaf: Any, mesh: Mesh, processes: int) -> NamedSharding:
    name = _name(path)
    if name in BY_ROW:
        return NamedSharding(mesh, PartitionSpec(*[None] * BY_ROW[name], ROWS))
    if name in BY_PROMPT:
        return _prompt_sharding(name, leaf, mesh, processes)
    return NamedSharding(mesh, PartitionSpec())


def _prompt_sharding(name: str, leaf: Any, mesh: Mesh, processes: int) -> NamedSharding:
    """Splits prompts over blocks of devices and, within a block, visual vectors by their width."""
    axis = BY_PROMPT[name]
    devices = row_devices(mesh)
    prompts = processes * leaf.shape[axis]
    blocks = math.gcd(prompts, devices)
    block = devices // blocks
    # The same devices in the same order as in `mesh`, so that one program can take arrays of both.
    block_mesh = Mesh(
        mesh.devices.reshape(blocks, block, -1),
        ("group", "share", "tensor"),
        (AxisType.Auto,) * 3,
    )
    axes: list[str | None] = [None] * leaf.ndim
    axes[axis] = "group"
    if name == "visual" and leaf.shape[-1] % block == 0:
        axes[-1] = "share"
    return NamedSharding(block_mesh, PartitionSpec(*axes))


def _name(path: tuple) -> str:
    """The name of an array in a batch. All arrays of a `Structure` count as `structure`."""
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return "structure" if "structure" in names else names[-1]
