"""Batches over a mesh: what has to divide, where each array lies, and how a batch is cut into micro-batches.

Owns the table from a batch's arrays to the mesh. Rows lie over data and fsdp; prompts too where there are enough of them; where there
are fewer, each lies on as many neighbours as share its rows, and is computed there in pieces. Refuses nothing: `fit` gives shapes that
divide, and what it adds is padding, which counts for nothing. Invariant: where an array lies changes no number.
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

# The axis of rows, and of prompts, in each array of a batch; arrays that stand in neither are whole on every device.
BY_ROW = MappingProxyType(
    dict.fromkeys(("ids", "segments", "sampled", "logprobs"), 0)
    | {"positions": 1}
    | dict.fromkeys(("mask", "behaviour", "reference", "rollout", "structure", "advantages"), 0)
)
BY_PROMPT = MappingProxyType(
    {"prompt_ids": 0, "prompt_positions": 1, "prompt_segments": 0, "visual": 0}
)


def parts_of(shapes: Sequence[BatchShape], devices: int, most: int, processes: int = 1) -> int:
    """In how many micro-batches batches of `shapes` are computed: as few as hold no more rows at a time than `most` would.

    Parts that the devices would pad until they are as large as larger ones save no memory. There are more where only that gives each of
    the processes as many whole groups.
    """
    parts = max(-(-shape.groups // _groups(shape, devices, most)) for shape in shapes)
    while any(_groups(shape, devices, parts) * parts % processes for shape in shapes):
        parts += 1
    return parts


def fitted(
    shapes: Sequence[BatchShape], most: int, mesh: Mesh | None
) -> tuple[tuple[BatchShape, ...], int]:
    """`shapes` with the padding that the mesh wants, and the number of micro-batches, `parts_of` at
    most `most`."""
    devices = 1 if mesh is None else row_devices(mesh)
    processes = 1 if mesh is None else len({device.process_index for device in mesh.devices.flat})
    parts = parts_of(shapes, devices, most, processes)
    return tuple(fit(shape, devices, parts) for shape in shapes), parts


def fit(shape: BatchShape, devices: int, parts: int = 1) -> BatchShape:
    """The shape with so many groups more, and its prompt so much longer, that each of `parts` micro-batches lies evenly over `devices`
    devices: whole groups on each, or each group's rows, evenly, on as many."""
    groups = _groups(shape, devices, parts)
    prompt = shape.prompt + -shape.prompt % max(1, devices // groups)
    return dataclasses.replace(shape, groups=groups * parts, prompt=prompt)


def _groups(shape: BatchShape, devices: int, parts: int) -> int:
    """Groups of one of `parts` micro-batches, padding included."""
    groups = -(-shape.groups // parts)
    while groups % devices and (devices % groups or groups * shape.rows % devices):
        groups += 1
    return groups


def require_even(mesh: Mesh) -> None:
    """Raises ValueError, on every process alike, for a mesh whose rows do not fall to the processes in equal parts."""
    each = collections.Counter(device.process_index for device in mesh.devices.flat)
    if (
        len(each) != jax.process_count()
        or len(set(each.values())) > 1
        or row_devices(mesh) % len(each)
    ):
        raise ValueError(
            f"mesh = {dict(mesh.shape)}: {sorted(each.values())} devices of {jax.process_count()} processes; take as many of each, and "
            "keep tensor inside a process: data * fsdp has to be a multiple of the processes"
        )


def own(shape: BatchShape) -> BatchShape:
    """This process's part of a batch of `shape`: as many whole groups as anybody's. ValueError where groups do not divide."""
    processes = jax.process_count()
    if shape.groups % processes:
        raise ValueError(
            f"batch.groups: {shape.groups} of a step, padding included, over {processes} processes; each lays whole groups out, so give a "
            f"number that {processes} divides"
        )
    return dataclasses.replace(shape, groups=shape.groups // processes)


def pieces(prompts: int, rows: int, length: int) -> int:
    """In how many pieces a prompt of `length` tokens is computed on the mesh that is set: one a device, where prompts are fewer."""
    mesh = current_mesh()
    devices = 1 if mesh is None else row_devices(mesh)
    many = devices // prompts if devices % prompts == 0 else 1
    return many if rows % devices == 0 == length % many else 1


def shardings(batch: T, mesh: Mesh, processes: int = 1) -> T:
    """Where each array of a batch (a tree of `Sequences`, `RLBatch`, `SFTBatch`, ...; real or abstract) lies. Of fewer prompts than
    devices each is whole on its neighbours, but for its visual vectors, which are cut in their width. `batch` is the whole, or what one of
    `processes` has of it."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _sharding(path, leaf, mesh, processes), batch
    )


def place(batch: T, mesh: Mesh) -> T:
    """A batch on the mesh. Every process gives its own rows and prompts, in the order of processes, and what is whole everywhere whole;
    arrays that are on devices already are moved where they have to be."""

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))

    return jax.tree.map(put, batch, shardings(batch, mesh, jax.process_count()))


def cut(rows: T, parts: int) -> T:
    """`parts` micro-batches of whole groups, or of packed rows: every array gets them as its first axis. For jitted programs."""
    mesh = current_mesh()

    def one(path: tuple, leaf: Array) -> Array:
        name = _name(path)
        axis = (BY_ROW | BY_PROMPT)[name]
        x = jnp.moveaxis(
            leaf.reshape(*leaf.shape[:axis], parts, -1, *leaf.shape[axis + 1 :]), axis, 0
        )
        prompts = leaf.shape[axis] // parts
        few = name in BY_PROMPT and mesh is not None and prompts % row_devices(mesh) > 0
        if few and name == "visual":
            return constrain(x, *[None] * (x.ndim - 1), ROWS)
        return x if few else constrain(x, *[None] * (axis + 1), ROWS)

    return jax.tree_util.tree_map_with_path(one, rows)


def _sharding(path: tuple, leaf: Any, mesh: Mesh, processes: int) -> NamedSharding:
    name, devices = _name(path), row_devices(mesh)
    if name in BY_ROW:
        return NamedSharding(mesh, PartitionSpec(*[None] * BY_ROW[name], ROWS))
    if name not in BY_PROMPT:
        return NamedSharding(mesh, PartitionSpec())
    groups = math.gcd(processes * leaf.shape[BY_PROMPT[name]], devices)
    # The same devices in the same order: a program takes arrays of both meshes.
    blocks = Mesh(
        mesh.devices.reshape(groups, devices // groups, -1),
        ("group", "share", "tensor"),
        (AxisType.Auto,) * 3,
    )
    width = "share" if name == "visual" and leaf.shape[-1] % (devices // groups) == 0 else None
    axes = [None] * leaf.ndim
    axes[BY_PROMPT[name]] = "group"
    return NamedSharding(blocks, PartitionSpec(*axes[:-1], width or axes[-1]))


def _name(path: tuple) -> str:
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return "structure" if "structure" in names else names[-1]
