"""Moves new weights from the mesh of training to the devices of each process's sampler.

Each host's sampler has all weights, split over its own devices along the axis `tensor`. The weights
go from device to device, without a copy in host memory. They are cast to the type of the
activations before they move: the engine multiplies in that type anyway, so bfloat16 halves memory
and traffic without changing a token.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.typing import DTypeLike

from models.sharding import MESH_AXES, RULES, make_mesh, param_shardings


def host_mesh(mesh: Mesh, per_host: int) -> Mesh:
    """The devices of `mesh` as hosts along `data` and each host's devices along `tensor`.

    Args:
        mesh: The mesh of training, whose devices are ordered host by host.
        per_host: Number of devices per host.

    Raises:
        ValueError: `per_host` does not divide the devices.
    """
    if mesh.size % per_host:
        raise ValueError(
            f"per_host = {per_host}: it does not divide {mesh.size} devices; give a divisor"
        )
    return Mesh(mesh.devices.reshape(-1, 1, per_host), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def make_sync(weights: Any, hosts: Mesh, dtype: DTypeLike) -> jax.stages.Wrapped:
    """Compile `f(weights) -> weights in dtype on the mesh of hosts`.

    Args:
        weights: Real or abstract weights on the mesh of training.
        hosts: The mesh to move them to, from `host_mesh`.
        dtype: The type they are cast to, before they move.
    """
    halfway = _halfway_shardings(weights, hosts)

    def sync(weights: Any) -> Any:
        cast = jax.tree.map(lambda x: x.astype(dtype), weights)
        return cast if halfway is None else jax.lax.with_sharding_constraint(cast, halfway)

    return jax.jit(sync, out_shardings=param_shardings(weights, hosts))


def _halfway_shardings(weights: Any, hosts: Mesh) -> Any:
    """Intermediate shardings of the move; None if the sizes of the mesh do not allow any.

    First, devices along fsdp are regrouped along `tensor`, as the samplers need it. Then the hosts
    exchange the rest. In a single step, XLA would gather every weight in full on every device.
    """
    # 2 hosts of 4 devices:   data  fsdp  tensor
    #   training               1     8     1
    #   halfway                1     2     4
    #   samplers               2     1     4
    mesh: Mesh = jax.tree.leaves(weights)[0].sharding.mesh
    data, fsdp, tensor = (mesh.shape[name] for name in MESH_AXES)
    factor, remainder = divmod(hosts.shape["tensor"], tensor)
    if remainder or factor == 0 or fsdp % factor:
        return None
    devices = mesh.devices.reshape(data, fsdp // factor, tensor * factor)
    return param_shardings(weights, Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * 3))


def sampler_devices(weights: Any, count: int) -> int:
    """Number of devices, out of a process's `count`, that its sampler uses.

    It is the largest number that divides both `count` and every weight axis along `tensor`.
    """
    parameters = jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, nnx.Variable))
    split_sizes = []
    for parameter in parameters:
        for axis, size in zip(parameter.get_metadata("axes"), parameter.shape, strict=True):
            if RULES[axis] == "tensor":
                split_sizes.append(size)
    return math.gcd(count, *split_sizes)


class WeightSync:
    """Brings weights from the mesh of training to this process's sampler.

    `program` is the jitted move across processes. It is None if the weights can be used as they
    are: on one device, in the right type.

    Args:
        weights: Real or abstract weights on the mesh of training.
        dtype: The type of the activations.
    """

    def __init__(self, weights: Any, dtype: DTypeLike):
        mesh: Mesh = jax.tree.leaves(weights)[0].sharding.mesh
        local = [
            device for device in mesh.devices.flat if device.process_index == jax.process_index()
        ]
        count = sampler_devices(weights, len(local))
        self._devices = local[:count]
        shardings = param_shardings(weights, make_mesh(1, 1, count, devices=self._devices))
        self._shardings = jax.tree.leaves(shardings)
        right_type = all(x.dtype == dtype for x in jax.tree.leaves(weights))
        self.program: jax.stages.Wrapped | None = None
        # Even a program that changes nothing would copy the weights.
        if mesh.size > 1 or not right_type:
            self.program = make_sync(weights, host_mesh(mesh, count), dtype)

    def __call__(self, weights: Any) -> Any:
        """The weights on this process's sampling devices."""
        moved = weights if self.program is None else self.program(weights)
        leaves, tree = jax.tree.flatten(moved)
        own = [self._own(x, place) for x, place in zip(leaves, self._shardings, strict=True)]
        return jax.tree.unflatten(tree, own)

    def _own(self, x: jax.Array, sharding: Any) -> jax.Array:
        """This process's shards of an array as an array of its own, without a copy."""
        parts = [shard.data for shard in x.addressable_shards if shard.device in self._devices]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)
