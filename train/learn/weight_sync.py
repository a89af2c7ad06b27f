"""New weights from training's mesh to every host's own devices, without a copy on a host.

Owns the engine's place on a pod: each host has all weights, cut over its own devices as the rules say for `tensor`. Refuses devices that
do not fall into hosts of one size. Invariant: the engine multiplies in the activations' type, so weights that come in that type sample
the same tokens as whole ones, in half the memory and traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.typing import DTypeLike

from models.sharding import MESH_AXES, RULES, make_mesh, param_shardings


def host_mesh(mesh: Mesh, per_host: int) -> Mesh:
    """The devices of training's mesh, in its order, which is host-major: hosts along `data`, a host's `per_host` devices along `tensor`.

    ValueError where they do not divide.
    """
    if mesh.size % per_host:
        raise ValueError(
            f"per_host = {per_host}: {mesh.size} devices do not fall into such hosts; give a number that divides them"
        )
    return Mesh(mesh.devices.reshape(-1, 1, per_host), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def make_sync(weights: Any, hosts: Mesh, dtype: DTypeLike) -> Callable[[Any], Any]:
    """The jitted `f(weights) -> weights` on the mesh of hosts, in `dtype`. `weights` (real or abstract) show names, shapes and places."""
    halfway = _halfway(weights, hosts)

    def sync(weights: Any) -> Any:
        cast = jax.tree.map(lambda x: x.astype(dtype), weights)
        return cast if halfway is None else jax.lax.with_sharding_constraint(cast, halfway)

    return jax.jit(sync, out_shardings=param_shardings(weights, hosts))


def _halfway(weights: Any, hosts: Mesh) -> Any:
    """Where weights lie once the devices of a host have cut among themselves what their sampler wants cut, and hosts have not yet given
    each other the rest. Told only the end, XLA gathers every weight whole on every device. None where there is no such place."""
    mesh: Mesh = jax.tree.leaves(weights)[0].sharding.mesh
    data, fsdp, tensor = (mesh.shape[name] for name in MESH_AXES)
    more, odd = divmod(hosts.shape["tensor"], tensor)
    if odd or not more or fsdp % more:
        return None
    devices = mesh.devices.reshape(data, fsdp // more, tensor * more)
    return param_shardings(weights, Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * 3))


def sampler_devices(weights: Any, count: int) -> int:
    """Over how many of a process's `count` devices its sampler is cut: the most that divide what `tensor` cuts in the weights."""
    parameters = jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, nnx.Variable))
    cut = math.gcd(
        *(
            size
            for p in parameters
            for axis, size in zip(p.get_metadata("axes"), p.shape, strict=True)
            if RULES[axis] == "tensor"
        )
    )
    return max(n for n in range(1, count + 1) if count % n == 0 == cut % n)


class WeightSync:
    """Weights on training's mesh -> in `dtype`, on this process's own devices, where its sampler takes them.

    The one step that crosses processes is `make_sync`'s; a process then takes its own shards as they are.
    """

    def __init__(self, weights: Any, dtype: DTypeLike):
        mesh: Mesh = jax.tree.leaves(weights)[0].sharding.mesh
        local = [
            device for device in mesh.devices.flat if device.process_index == jax.process_index()
        ]
        each = sampler_devices(weights, len(local))
        self._devices = local[:each]
        self._places = jax.tree.leaves(
            param_shardings(weights, make_mesh(1, 1, each, devices=self._devices))
        )
        same = mesh.size == 1 and all(x.dtype == dtype for x in jax.tree.leaves(weights))
        # On one device, in the same type, there is nothing to do, and a program would copy the weights.
        self._sync = (lambda x: x) if same else make_sync(weights, host_mesh(mesh, each), dtype)

    def __call__(self, weights: Any) -> Any:
        leaves, tree = jax.tree.flatten(self._sync(weights))
        return jax.tree.unflatten(
            tree, [self._take(x, place) for x, place in zip(leaves, self._places, strict=True)]
        )

    def _take(self, x: jax.Array, place: Any) -> jax.Array:
        parts = [shard.data for shard in x.addressable_shards if shard.device in self._devices]
        return jax.make_array_from_single_device_arrays(x.shape, place, parts)
