"""How parameters are laid over a mesh: one table from logical axis names to mesh axes.

Owns the mesh (`data`, `fsdp`, `tensor`), the table and its application. Parameters carry their logical names as metadata `axes`
(`models.qwen3_vl.layers`). Refuses two dimensions of one parameter on the same mesh axis, and dimensions that do not divide.
Invariant: the mesh changes where numbers lie, never which they are; one device is the mesh 1 x 1 x 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

RULES: Mapping[str, str | None] = MappingProxyType(
    {
        "embed": "fsdp",
        "vocab": "tensor",
        "heads": "tensor",
        "kv_heads": "tensor",
        "mlp": "tensor",
        # Short, or scanned over: whole on every device.
        "layer": None,
        "head_dim": None,
        "norm": None,
        "patch": None,
        "position": None,
    }
)

BATCH = PartitionSpec(("data", "fsdp"))  # rows of a batch lie over every device that does not share a row's matmuls


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh over the first data * fsdp * tensor devices. ValueError where there are fewer."""
    wanted, devices = data * fsdp * tensor, jax.devices()
    if min(data, fsdp, tensor) < 1 or wanted > len(devices):
        raise ValueError(f"mesh = {data} x {fsdp} x {tensor} (data, fsdp, tensor): there are {len(devices)} devices; choose sizes that fit")
    return jax.make_mesh((data, fsdp, tensor), MESH_AXES, (AxisType.Auto,) * 3, devices=devices[:wanted])


def param_shardings(state: Any, mesh: Mesh | AbstractMesh, rules: Mapping[str, str | None] = RULES) -> Any:
    """A NamedSharding for every parameter of an nnx state (abstract or real), in a tree that `jax.device_put` and `jit` take.

    ValueError naming parameter and axis where a name has no rule, where two dimensions claim one mesh axis, or where a dimension
    does not divide.
    """

    def one(path: tuple, variable: nnx.Variable) -> Any:
        return variable.replace(NamedSharding(mesh, _spec("/".join(map(str, path)), variable, mesh, rules)))

    return nnx.map_state(one, state)


def _spec(name: str, variable: nnx.Variable, mesh: Mesh | AbstractMesh, rules: Mapping[str, str | None]) -> PartitionSpec:
    axes, shape = variable.get_metadata("axes"), variable.shape
    taken: dict[str, str] = {}
    for axis, size in zip(axes, shape, strict=True):
        if axis not in rules:
            raise ValueError(f"{name}: axis {axis!r} has no rule; add it to models.sharding.RULES (None = whole on every device)")
        target = rules[axis]
        if target is None:
            continue
        if target in taken:
            raise ValueError(f"{name}: axes {taken[target]!r} and {axis!r} both go to mesh axis {target!r}; give one of them another rule")
        taken[target] = axis
        if target not in mesh.shape:
            raise ValueError(f"mesh = {dict(mesh.shape)}: axis {axis!r} goes to mesh axis {target!r}; make the mesh with make_mesh")
        if size % mesh.shape[target]:
            raise ValueError(
                f"{name}: axis {axis!r} of size {size} does not divide over {mesh.shape[target]} devices of mesh axis {target!r}; "
                f"make that axis {math.gcd(size, mesh.size)} long, or change the size"
            )
    return PartitionSpec(*(rules[axis] for axis in axes))
