"""How parameters and activations are laid over a mesh: one table from logical axis names to mesh axes.

Owns the mesh - `data` repeats weights, `fsdp` cuts them, `tensor` cuts heads, MLP and vocabulary -, the table and its application.
Parameters carry their logical names as metadata `axes` (`models.qwen3_vl.layers`). Refuses two dimensions of one parameter on the same
mesh axis, and dimensions that do not divide. Invariant: the mesh changes where numbers lie, never which they are; one device is the
mesh 1 x 1 x 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import numpy as np
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

BATCH = PartitionSpec(
    ("data", "fsdp")
)  # rows of a batch lie over every device that does not share a row's matmuls
ROWS = BATCH[0]

Axes = str | tuple[str, ...] | None  # mesh axes that cut one dimension
T = TypeVar("T")


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh over the first data * fsdp * tensor devices, those of a process side by side, so that one order of devices serves
    training and the rollouts of each host. ValueError where there are fewer. `devices`: a topology's, instead of this machine's.
    """
    found = sorted(
        jax.devices() if devices is None else devices,
        key=lambda device: (device.process_index, device.id),
    )
    wanted = data * fsdp * tensor
    if min(data, fsdp, tensor) < 1 or wanted > len(found):
        raise ValueError(
            f"mesh = {data} x {fsdp} x {tensor} (data, fsdp, tensor): it takes {wanted} devices, 1 or more an axis, and there are "
            f"{len(found)}; choose sizes whose product is at most {len(found)}"
        )
    return Mesh(
        np.array(found[:wanted]).reshape(data, fsdp, tensor), MESH_AXES, (AxisType.Auto,) * 3
    )


def row_devices(mesh: Mesh | AbstractMesh) -> int:
    """Devices that rows of a batch lie over: data * fsdp."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def current_mesh() -> AbstractMesh | None:
    """The mesh that is set (`jax.set_mesh`); None where there is none, it is one device, or a shard_map has cut the arrays already."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 or mesh.are_all_axes_manual else mesh


def constrain(x: T, *axes: Axes) -> T:
    """Arrays laid over the mesh that is set, dimension by dimension; what these do not name is whole. Dimensions that do not divide are
    left to the compiler, and where no mesh is set nothing happens."""
    mesh = current_mesh()
    return x if mesh is None else jax.tree.map(lambda leaf: _constrain(leaf, mesh, axes), x)


def _constrain(x: jax.Array, mesh: AbstractMesh, axes: tuple[Axes, ...]) -> jax.Array:
    def place(size: int, names: Axes) -> Any:
        wanted = (names,) if isinstance(names, str) else names or ()
        return (
            names
            if size % math.prod(mesh.shape[name] for name in wanted) == 0
            else PartitionSpec.UNCONSTRAINED
        )

    whole = axes + (None,) * (x.ndim - len(axes))
    return jax.lax.with_sharding_constraint(
        x, PartitionSpec(*(place(*pair) for pair in zip(x.shape, whole, strict=True)))
    )


def param_shardings(
    state: Any, mesh: Mesh | AbstractMesh, rules: Mapping[str, str | None] = RULES
) -> Any:
    """A NamedSharding for every parameter of an nnx state (abstract or real), in a tree that `jax.device_put` and `jit` take.

    ValueError naming parameter and axis where a name has no rule, where two dimensions claim one mesh axis, or where a dimension
    does not divide.
    """

    def one(path: tuple, variable: nnx.Variable) -> Any:
        return variable.replace(
            NamedSharding(mesh, _spec("/".join(map(str, path)), variable, mesh, rules))
        )

    return nnx.map_state(one, state)


def _spec(
    name: str, variable: nnx.Variable, mesh: Mesh | AbstractMesh, rules: Mapping[str, str | None]
) -> PartitionSpec:
    axes, shape = variable.get_metadata("axes"), variable.shape
    taken: dict[str, str] = {}
    for axis, size in zip(axes, shape, strict=True):
        if axis not in rules:
            raise ValueError(
                f"{name}: axis {axis!r} has no rule; add it to models.sharding.RULES (None = whole on every device)"
            )
        target = rules[axis]
        if target is None:
            continue
        if target in taken:
            raise ValueError(
                f"{name}: axes {taken[target]!r} and {axis!r} both go to mesh axis {target!r}; give one of them another rule"
            )
        taken[target] = axis
        if target not in mesh.shape:
            raise ValueError(
                f"mesh = {dict(mesh.shape)}: axis {axis!r} goes to mesh axis {target!r}; make the mesh with make_mesh"
            )
        if size % mesh.shape[target]:
            raise ValueError(
                f"{name}: axis {axis!r} of size {size} does not divide over {mesh.shape[target]} devices of mesh axis {target!r}; "
                f"make that axis {math.gcd(size, mesh.size)} long, or change the size"
            )
    return PartitionSpec(*(rules[axis] for axis in axes))
