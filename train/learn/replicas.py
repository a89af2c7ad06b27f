"""Gradients in each replica of the weights, and one reduction over replicas per update.

The mesh axis `data` counts replicas. Every TPU slice has one, since the network between slices is
slow. So each replica adds up the gradients of its own rows over all micro-batches, and the sums of
all replicas are added once, before the optimizer's step. To a replica, its rows are a micro-batch
of their own: losses, metrics and gradients of micro-batches add up.

With a single replica nothing here changes a program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from models.sharding import MESH_AXES, ROWS, MeshProgram
from train.learn.batch import Microbatch
from train.learn.placement import row_specs

REPLICAS = MESH_AXES[0]
_BY_REPLICA = PartitionSpec(REPLICAS)

Gradients = Callable[..., tuple[Any, dict[str, Array]]]


def replicas(mesh: Mesh | None) -> int:
    """Number of replicas of the weights."""
    return 1 if mesh is None else mesh.shape[REPLICAS]


def bank_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a step's visual vectors [rows, m, c, d]: every replica has all of them.

    Any row may need any vector, and none should cross between slices once per micro-batch.
    """
    axes = ROWS if replicas(mesh) == 1 else tuple(name for name in ROWS if name != REPLICAS)
    return NamedSharding(mesh, PartitionSpec(axes))


def make_bank_share(mesh: Mesh) -> MeshProgram:
    """Compile what gives every replica the visual vectors of all rows, once per step."""

    # Not a lambda: the log of compilations names functions.
    def share_bank(vectors: Array) -> Array:
        return vectors

    return MeshProgram(jax.jit(share_bank, out_shardings=bank_sharding(mesh)), mesh)


def sums_sharding(sharding: Any, mesh: Mesh | None) -> Any:
    """The sharding of gradients, given that of what they are of.

    Several replicas have a sum each: the first axis of gradients counts replicas.
    """
    if mesh is None or replicas(mesh) == 1:
        return sharding
    return NamedSharding(mesh, PartitionSpec(REPLICAS, *sharding.spec))


def sums_shape(shape: tuple[int, ...], mesh: Mesh | None) -> tuple[int, ...]:
    """The shape of gradients, given that of what they are of."""
    return shape if replicas(mesh) == 1 else (replicas(mesh), *shape)


def sums_of(arrays: Any, mesh: Mesh | None) -> Any:
    """Gradients of arrays as abstract arrays, in float32."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
        shape, sharding = sums_shape(x.shape, mesh), sums_sharding(x.sharding, mesh)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    return jax.tree.map(one, arrays)


def over_replicas(sums: Any, mesh: Mesh | None, shardings: Any = None) -> Any:
    """The sums over replicas: the one reduction of an update.

    Args:
        sums: Gradients, with a first axis of replicas if there are several.
        mesh: The mesh.
        shardings: Those of `sums`; None: they are known.
    """
    if replicas(mesh) == 1:
        return sums
    if shardings is not None:
        sums = jax.lax.with_sharding_constraint(sums, shardings)
    return jax.tree.map(lambda x: x.sum(0), sums)


def in_replicas(function: Gradients, mesh: Mesh | None) -> Gradients:
    """`function` in every replica, each with its own rows of the batch.

    Args:
        function: `f(arrays, sums, batch, number=()) -> (sums, metrics)`. Arrays are the same in all
            replicas, `sums` may be None, and with several replicas `number` has that of the
            replica, to draw with.
        mesh: The mesh.

    Returns:
        The same function for all rows, without `number`. The first axis of its sums counts
        replicas. Its metrics are sums over replicas, or the maximum for `*_max`.
    """
    if replicas(mesh) == 1:
        return functools.partial(function, number=())

    def of_all(arrays: Any, sums: Any, batch: Any) -> tuple[Any, Any]:
        def local(arrays: Any, sums: Any, rows: Any, numbers: Any) -> tuple[Any, Any]:
            # [1, ...] -> [...], and back.
            sums, number = jax.tree.map(lambda x: x[0], (sums, numbers))
            rows = tuple(_in_replica(part, number) for part in rows)
            sums, metrics = function(arrays, sums, rows, number=(number,))
            return jax.tree.map(lambda x: x[None], sums), _of_all_rows(metrics)

        return jax.shard_map(
            local,
            in_specs=(PartitionSpec(), _BY_REPLICA, row_specs(batch, REPLICAS), _BY_REPLICA),
            out_specs=(_BY_REPLICA, PartitionSpec()),
            axis_names={REPLICAS},
            check_vma=False,
        )(arrays, sums, batch, jnp.arange(replicas(mesh)))

    return of_all


def _of_all_rows(metrics: Mapping[str, Array]) -> dict[str, Array]:
    """Metrics of all replicas, given those of one."""
    largest = {name: x for name, x in metrics.items() if name.endswith("_max")}
    added = {name: x for name, x in metrics.items() if name not in largest}
    return jax.lax.psum(added, REPLICAS) | jax.lax.pmax(largest, REPLICAS)


def _in_replica(part: Any, number: Int[Array, ""]) -> Any:
    """A part of a batch whose rows are those of a replica: it has no tokens of other replicas."""
    if not isinstance(part, Microbatch):
        return part
    own = part.index - number * part.ids.size
    index = jnp.where((own >= 0) & (own < part.ids.size), own, -1)
    return dataclasses.replace(part, index=index)
