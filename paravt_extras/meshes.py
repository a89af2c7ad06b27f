"""The meshes that a run can have on its hosts, and the nearest one if its own is none of them.

A weight's dimension that does not divide over its mesh axis is whole on the devices of that axis if
it is a small part of the model (`models.sharding.WHOLE_UNLESS_DIVIDING`). All others must divide.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh

from models.config import ModelConfig
from models.lora import LoRASettings
from models.model import abstract_model
from models.sharding import MESH_AXES, param_shardings
from paravt_extras.slices import Devices
from train.settings import Run

Sizes = tuple[int, int, int]
"""Sizes of (data, fsdp, tensor)."""


def mesh_sizes(run: Run) -> Sizes:
    """Sizes of the run's mesh; 0 where one is left open."""
    return run.mesh.data, run.mesh.fsdp, run.mesh.tensor


def require_dividing(run: Run, devices: Devices) -> None:
    """Check a run's mesh, whose sizes are all known, against its model and devices.

    Args:
        run: The run.
        devices: All devices. Each host has as many rows of a batch as the others, and each slice
            has whole replicas of the weights.

    Raises:
        ValueError: There are too few devices, or something does not divide; names the nearest mesh
            with which everything does.
    """
    mesh = mesh_sizes(run)
    reason = _misfit(run, mesh, devices)
    if not reason:
        return
    # On a single host, the mesh may leave devices idle.
    alone = devices.hosts == devices.slices == 1
    count = min(math.prod(mesh), devices.count) if alone else devices.count
    fitting = [other for other in _meshes(count) if not _misfit(run, other, devices)]
    if not fitting:
        raise ValueError(
            f"mesh: {_named(mesh)}: {reason}; no mesh of {count} devices works: give --mesh.data a "
            f"multiple of {devices.slices}, and --mesh.data times --mesh.fsdp one of "
            f"{devices.hosts}"
        )
    nearest = min(fitting, key=functools.partial(_distance, mesh))
    flags = " ".join(f"--mesh.{axis} {size}" for axis, size in zip(MESH_AXES, nearest, strict=True))
    raise ValueError(
        f"mesh: {_named(mesh)}: {reason}; leave it open, or give the nearest one over which "
        f"everything divides, whether it fits in memory or not: {flags}"
    )


def _named(mesh: Sizes) -> str:
    return f"{' x '.join(map(str, mesh))} (data, fsdp, tensor)"


def _misfit(run: Run, mesh: Sizes, devices: Devices) -> str:
    """Why a mesh does not work; empty if it does."""
    data, fsdp, tensor = mesh
    count = math.prod(mesh)
    if count > devices.count:
        return f"takes {count} devices, but there are {devices.count}"
    if data % devices.slices:
        return (
            f"data is not a multiple of the {devices.slices} slices, each of which needs whole "
            "replicas"
        )
    if count < devices.count and not devices.hosts == devices.slices == 1:
        return f"takes {count} of {devices.count} devices, but several hosts have to use all"
    if data * fsdp % devices.hosts:
        return (
            "the rows of a batch, over data * fsdp devices, do not divide over "
            f"{devices.hosts} hosts"
        )
    if fsdp == tensor == 1:
        return ""
    # The vocabulary of a tiny model is made from its data, and not known yet.
    config = run.model.config(vocab_size=tensor)
    heads, kv_heads = config.text.num_attention_heads, config.text.num_key_value_heads
    if heads % math.lcm(kv_heads, tensor):
        return f"{heads} heads and {kv_heads} kv heads do not divide over {tensor} devices"
    try:
        param_shardings(_decoder(config, run.lora), AbstractMesh(mesh, MESH_AXES))
    except ValueError as error:
        return str(error).partition(";")[0]
    return ""


@functools.cache
def _decoder(config: ModelConfig, lora: LoRASettings | None) -> Any:
    """The abstract weights of the decoder. All dimensions of the tower may be whole."""
    return nnx.state(abstract_model(config, lora=lora).text)


def _meshes(devices: int) -> Iterator[Sizes]:
    """All meshes of this number of devices."""
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    for data, fsdp in itertools.product(divisors, divisors):
        if devices % (data * fsdp) == 0:
            yield data, fsdp, devices // (data * fsdp)


def _distance(mesh: Sizes, other: Sizes) -> tuple[float, Sizes]:
    """How far the sizes of two meshes are apart, in doublings; equals are ordered by size."""
    apart = sum(abs(math.log2(a / b)) for a, b in zip(mesh, other, strict=True))
    return round(apart, 6), other


def sharded_bytes(state: Any, mesh: Sizes) -> float:
    """Bytes of weights on each device of a mesh."""
    abstract = AbstractMesh(mesh, MESH_AXES)
    shardings = jax.tree.leaves(param_shardings(state, abstract))
    return float(
        sum(
            math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x, sharding in zip(jax.tree.leaves(state), shardings, strict=True)
        )
    )
