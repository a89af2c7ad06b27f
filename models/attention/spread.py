"""Attention over a mesh: kernels run in a `shard_map`, since the compiler cannot shard them.

Each device gets whole sequences, and with `tensor` whole kv heads of them. If there are fewer
sequences than devices, a sequence is cut into pieces, one per device:

    devices      0         1         2         3
    pieces     A[0:t]    A[t:2t]   B[0:t]    B[t:2t]      (2 sequences, pieces = 2)

The devices of a sequence exchange pieces of all heads for the whole sequence of some heads, and
back again afterwards. A kernel therefore sees the sequences that it would see on one device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from models.attention.target import RowLayout
from models.sharding import BATCH, current_mesh, on_devices, row_axes, row_devices

Kernel = Callable[..., Float[Array, "b t n h"]]


def fits(
    q: Float[Array | jax.ShapeDtypeStruct, "b t n h"],
    k: Float[Array | jax.ShapeDtypeStruct, "b t k h"],
    pieces: int,
) -> bool:
    """Return whether a mesh is set over which heads and rows divide."""
    mesh = current_mesh()
    if mesh is None:
        return False
    devices, tensor = row_devices(mesh), mesh.shape["tensor"]
    # With pieces, every device holds exactly one.
    rows_fit = len(q) == devices if pieces > 1 else len(q) % devices == 0
    # Of a device of `tensor`, with copies of kv heads.
    heads, kv_heads = q.shape[2] // tensor, math.lcm(k.shape[2], tensor) // tensor
    pieces_fit = heads % pieces == 0 and (kv_heads % pieces == 0 or pieces % kv_heads == 0)
    return rows_fit and pieces_fit and q.shape[2] % math.lcm(k.shape[2], tensor) == 0


def attend(
    kernel: Kernel,
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    layout: RowLayout,
) -> Float[Array, "b t n h"]:
    """Run `kernel` on every device of the current mesh."""
    mesh, pieces = current_mesh(), layout.pieces
    assert mesh is not None
    # If kv heads do not divide over `tensor`, the smallest number of copies of each that does.
    copies = math.lcm(k.shape[2], mesh.shape["tensor"]) // k.shape[2]
    if copies > 1:
        k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
    # blocks[i]: the row devices that hold the pieces of sequence i, in order.
    blocks = [[*range(first, first + pieces)] for first in range(0, row_devices(mesh), pieces)]

    def local(q, k, v, layout):
        if pieces > 1:
            return _attend_in_pieces(kernel, (q, k, v), layout, row_axes(mesh), blocks)
        return kernel(q, k, v, layout)

    arrays = (q, k, v, layout)
    # [rows, positions, heads, head_dim], [rows, positions] and [rows]
    heads = PartitionSpec(*BATCH, None, "tensor")
    specs = jax.tree.map(lambda x: heads if x.ndim == 4 else BATCH, arrays)
    return on_devices(local, specs, heads)(*arrays)


def _attend_in_pieces(
    kernel: Kernel,
    qkv: tuple[Float[Array, "1 t n h"], Float[Array, "1 t k h"], Float[Array, "1 t k h"]],
    layout: RowLayout,
    rows: tuple[str, ...],
    blocks: list[list[int]],
) -> Float[Array, "1 t n h"]:
    """Return the attention of this device's piece to its whole sequence."""
    q, k, v = qkv
    pieces, kv_heads = layout.pieces, k.shape[2]

    def gather(x: Array) -> Array:
        """Return all pieces of this device's sequence, joined along positions."""
        return jax.lax.all_gather(x, rows, axis=1, axis_index_groups=blocks, tiled=True)

    segments, starts = jax.tree.map(gather, (layout.segments, layout.starts))
    layout = dataclasses.replace(layout, segments=segments, starts=starts, pieces=1)

    def exchange(x: Array, split: int, joined: int) -> Array:
        return jax.lax.all_to_all(x, rows, split, joined, axis_index_groups=blocks, tiled=True)

    if kv_heads % pieces:
        # Fewer kv heads than pieces: repeat each, so that every device gets the one it needs.
        k = jnp.repeat(k, pieces // kv_heads, axis=2)
        v = jnp.repeat(v, pieces // kv_heads, axis=2)
    # [1, t, n, h] -> [1, pieces * t, n / pieces, h], and back.
    q, k, v = (exchange(x, 2, 1) for x in (q, k, v))
    return exchange(kernel(q, k, v, layout), 1, 2)
