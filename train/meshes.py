"""The meshes that a run can have on its hosts, and the nearest one if its own is none of them.

A weight's dimension that does not divide over its mesh axis is whole on the devices of that axis if
it is a small part of the model (`models.sharding.WHOLE_IF_ODD`). All others must divide.
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
from train.settings import Run

Sizes = tuple[int, int, int]
"""Sizes of (data, fsdp, tensor)."""


def mesh_sizes(run: Run) -> Sizes:
    """Sizes of the run's mesh; 0 where one is left open."""
    return run.mesh.data, run.mesh.fsdp, run.mesh.tensor


def require_dividing(run: Run, hosts: int, slices: int = 1) -> None:
    """Check a run's mesh, whose sizes are all known, against its model, hosts and slices.

    Args:
        run: The run.
        hosts: Number of hosts, each of which has as many rows of a batch as the others.
        slices: Number of TPU slices, each of which has whole replicas of the weights.

    Raises:
        ValueError: Something does not divide; names the nearest mesh of as many devices with which
            everything does.
    """
    mesh = mesh_sizes(run)
    reason = _misfit(run, mesh, hosts, slices)
    if not reason:
        return
    fitting = [
        other for other in _meshes(math.prod(mesh)) if not _misfit(run, other, hosts, slices)
    ]
    if not fitting:
        raise ValueError(
            f"mesh: {_named(mesh)}: {reason}; no mesh of {math.prod(mesh)} devices works: give "
            f"--mesh.data times --mesh.fsdp a multiple of {math.lcm(hosts, slices)}"
        )
    nearest = min(fitting, key=functools.partial(_distance, mesh))
    flags = " ".join(f"--mesh.{axis} {size}" for axis, size in zip(MESH_AXES, nearest, strict=True))
    raise ValueError(f"mesh: {_named(mesh)}: {reason}; the nearest mesh that works: {flags}")


def _named(mesh: Sizes) -> str:
    return f"{' x '.join(map(str, mesh))} (data, fsdp, tensor)"


def _misfit(run: Run, mesh: Sizes, hosts: int, slices: int) -> str:
    """What does not divide over a mesh; empty if everything does."""
    data, fsdp, tensor = mesh
    if data % slices:
        return f"{slices} slices, with a slow network between them, need whole replicas each"
    if data * fsdp % hosts:
        return f"the rows of a batch, over data * fsdp devices, do not divide over {hosts} hosts"
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
