"""The mesh, and how parameters and activations are sharded over it.

The mesh has three axes: `data` replicates weights, `fsdp` shards them, and `tensor` shards heads,
the MLP or the experts, and the vocabulary. Parameters carry logical axis names as the metadata
`axes` (`models.layers`), and `RULES` maps each of those to a mesh axis. A single device is the mesh
1 x 1 x 1. Gradients are computed in each replica by itself (`train.learn.placement`): there, arrays
have the rows of the replica, and `data` shards nothing.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axis. None: whole on every device.
RULES: Mapping[str, str | None] = MappingProxyType(
    {
        "embed": "fsdp",
        "vocab": "tensor",
        "heads": "tensor",
        "kv_heads": "tensor",
        "mlp": "tensor",
        "expert": "tensor",
        "expert_in": "fsdp",
        "expert_out": None,
        "router": None,
        "tower_embed": "fsdp",
        "tower_heads": "tensor",
        "tower_mlp": "tensor",
        # A scan takes slices along `layer`, which have to be local.
        "layer": None,
        # Short axes: sharding them would save little and cost communication.
        "head_dim": None,
        "norm": None,
        "patch": None,
        "position": None,
        "rank": None,
    }
)

# Logical axes that are whole on all devices of a mesh axis over which they do not divide. There may
# be fewer kv heads than devices of `tensor`, and a tower may have a width such as the 1,152 of the
# 8B model. Their weights are a small part of a model. All other axes have to divide.
WHOLE_UNLESS_DIVIDING = frozenset({"kv_heads", "tower_embed", "tower_heads", "tower_mlp"})

# Mesh axes that shard the rows of a batch. The devices of `tensor` share a row's matmuls.
ROWS = ("data", "fsdp")
BATCH = PartitionSpec(ROWS)

# Mesh axes that shard one dimension.
Axes = str | tuple[str, ...] | None
T = TypeVar("T")

# Traces a program for given arguments: a `functools.partial` of the program's `lower`.
# `models.compilation` names it after the program, and compiles the result.
Lowering = Callable[[], jax.stages.Lowered]


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """Return a mesh over the first data * fsdp * tensor devices.

    Devices are ordered by TPU slice and process. A replica lies within a slice.

    Args:
        data: number of replicas of the weights.
        fsdp: number of shards of the weights and of the batch.
        tensor: number of devices that share the heads, the MLP and the vocabulary.
        devices: devices to choose from, for example those of a topology; None: all of this run.

    Raises:
        ValueError: there are fewer devices, or a replica would need devices of several slices.
    """
    # Sorted by process, so that training and the rollouts of each host list the host's devices in
    # the same order.
    ordered = sorted(
        jax.devices() if devices is None else devices,
        key=lambda device: (slice_of(device), device.process_index, device.id),
    )
    wanted = data * fsdp * tensor
    if min(data, fsdp, tensor) < 1 or wanted > len(ordered):
        raise ValueError(
            f"mesh = {data} x {fsdp} x {tensor} (data, fsdp, tensor): it needs {wanted} devices, "
            f"at least 1 per axis, and there are {len(ordered)}; choose sizes whose product is at "
            f"most {len(ordered)}"
        )
    grid = np.array(ordered[:wanted]).reshape(data, fsdp, tensor)
    if any(len({slice_of(device) for device in replica.flat}) > 1 for replica in grid):
        per_slice = len(ordered) // len({slice_of(device) for device in ordered})
        raise ValueError(
            f"mesh = {data} x {fsdp} x {tensor} (data, fsdp, tensor): a replica's {fsdp * tensor} "
            f"devices would lie in several slices, whose network is slow; make fsdp * tensor a "
            f"divisor of the {per_slice} devices of a slice, and data larger"
        )
    return Mesh(grid, MESH_AXES, (AxisType.Auto,) * 3)


def slice_of(device: Any) -> int:
    """Return the TPU slice of a device; 0 for devices of other platforms."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def mesh_of(weights: Any) -> Mesh | None:
    """Return the mesh of real or abstract weights; None if they are not sharded over a mesh."""
    sharding = jax.tree.leaves(weights)[0].sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    return None


def require_mesh(weights: Any) -> Mesh:
    """Return the mesh of real or abstract weights, which have one."""
    mesh = mesh_of(weights)
    assert mesh is not None, "weights without a mesh; shard them with `param_shardings`"
    return mesh


def row_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return the mesh axes that shard the rows of a batch: in a replica, those of its own rows."""
    return tuple(name for name in ROWS if name not in mesh.manual_axes)


def row_devices(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of devices that the rows of a batch are sharded over: data * fsdp."""
    return math.prod(mesh.shape[name] for name in row_axes(mesh))


def current_mesh() -> AbstractMesh | None:
    """Return the mesh set with `jax.set_mesh`, if there is anything to shard.

    None without a mesh, on a single device, and inside a shard_map, where arrays are shards
    already.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 or mesh.are_all_axes_manual else mesh


class MeshProgram(NamedTuple):
    """A jitted function that sets its mesh when it is called or lowered."""

    jitted: Any
    mesh: Mesh | None
    first: tuple[Any, ...] = ()
    """Arguments of every call, before those of the caller: the frozen weights. As constants, they
    would be part of the program."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with self._set():
            return self.jitted(*self.first, *arguments, **options)

    def lower(self, *arguments: Any, **options: Any) -> Any:
        """Lower like `jax.jit(...).lower`, for arrays or their abstract shapes."""
        with self._set():
            return self.jitted.lower(*self.first, *arguments, **options)

    def _set(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the shape, type and sharding of an array, for which programs compile as for the array
    itself."""
    # An array that no one has placed goes where the others are.
    sharding = x.sharding if x.committed else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def zeros(abstract: Any) -> Any:
    """Return arrays of zeros, like the abstract ones of a tree."""
    leaves, structure = jax.tree.flatten(abstract)
    return jax.tree.unflatten(structure, _zeros_program(*leaves)())


# Cached: a new function would compile again.
@functools.cache
def _zeros_program(*leaves: jax.ShapeDtypeStruct) -> Callable[[], tuple[jax.Array, ...]]:
    def make_zeros() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves)

    return jax.jit(make_zeros, out_shardings=tuple(leaf.sharding for leaf in leaves))


def constrain(x: T, *axes: Axes) -> T:
    """Shard arrays over the current mesh, one entry of `axes` per leading dimension.

    In a replica, `data` is left out. Dimensions without an entry are whole. Dimensions that do not
    divide evenly are left to the compiler. Without a mesh nothing happens.
    """
    mesh = current_mesh()
    return x if mesh is None else jax.tree.map(lambda leaf: _constrain(leaf, mesh, axes), x)


def _constrain(x: jax.Array, mesh: AbstractMesh, axes: tuple[Axes, ...]) -> jax.Array:
    def spec(size: int, names: Axes) -> Any:
        wanted = _without_manual(names, mesh)
        devices = math.prod(mesh.shape[name] for name in wanted)
        return wanted or None if size % devices == 0 else PartitionSpec.UNCONSTRAINED

    all_axes = axes + (None,) * (x.ndim - len(axes))
    specs = [spec(size, names) for size, names in zip(x.shape, all_axes, strict=True)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*specs))


def _without_manual(names: Axes, mesh: AbstractMesh) -> tuple[str, ...]:
    """Return the mesh axes among `names` that the compiler shards."""
    wanted = (names,) if isinstance(names, str) else names or ()
    return tuple(name for name in wanted if name not in mesh.manual_axes)


def on_devices(function: Callable[..., T], in_specs: Any, out_specs: Any) -> Callable[..., T]:
    """Run `function` on each device of the current mesh, on its shards (`jax.shard_map`).

    In a replica, these are its own devices, and `data` is left out of the specs.
    """
    mesh = current_mesh()
    assert mesh is not None, "on_devices without a mesh"

    def own(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*(_without_manual(names, mesh) or None for names in spec))

    in_specs, out_specs = jax.tree.map(
        own, (in_specs, out_specs), is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    names = set(mesh.axis_names) - set(mesh.manual_axes)
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False
    )


def param_shardings(state: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Return the sharding of every parameter of an nnx state, in a tree for `jax.device_put` and
    `jit`.

    Args:
        state: real or abstract parameters.
        mesh: the mesh to shard them over, from `make_mesh`.

    Raises:
        ValueError: a dimension does not divide and is not in `WHOLE_UNLESS_DIVIDING`.
    """

    def one(path: tuple, variable: nnx.Variable) -> Any:
        name = "/".join(map(str, path))
        return variable.replace(NamedSharding(mesh, _spec(name, variable, mesh)))

    return nnx.map_state(one, state)


def _spec(name: str, variable: nnx.Variable, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    mesh_axes: list[str | None] = []
    for axis, size in zip(variable.get_metadata("axes"), variable.shape, strict=True):
        mesh_axis = RULES[axis]
        devices = 1 if mesh_axis is None else mesh.shape[mesh_axis]
        divides = size % devices == 0
        if not divides and axis not in WHOLE_UNLESS_DIVIDING:
            raise ValueError(
                f"{name}: axis {axis!r} of size {size} does not divide over {devices} devices of "
                f"mesh axis {mesh_axis!r}; make that axis {math.gcd(size, mesh.size)} long, or "
                "change the size"
            )
        mesh_axes.append(mesh_axis if divides else None)
    return PartitionSpec(*mesh_axes)
