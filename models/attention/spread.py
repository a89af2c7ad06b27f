"""How attention lies on a mesh: each device gets whole sequences, and with `tensor` whole kv heads of them.

Owns what devices exchange. A compiler cannot cut a kernel, so kernels run in a `shard_map`. Prompts that are fewer than devices lie in
pieces, one a device: for its own attention the devices of a prompt swap pieces of all heads for all pieces of some heads, and back
again; rows gather keys and values of the one prompt that they attend to, and of no other. Refuses nothing: `fits` is asked first.
Invariant: the kernel sees the sequences that it would see on one device, and no prompt is computed twice (but where heads do not divide).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from models.sharding import BATCH, ROWS, current_mesh, row_devices

Kernel = Callable[..., Float[Array, "b t n h"]]
Prefix = tuple[Float[Array, "p s k h"], Float[Array, "p s k h"]]


def fits(
    q: Float[Array, "b t n h"], k: Float[Array, "b t k h"], prefix: Prefix | None, pieces: int
) -> bool:
    """Whether a mesh is set that the arrays divide over: heads, rows, and prompts, whole or in a piece a device."""
    mesh = current_mesh()
    if mesh is None:
        return False
    devices, prompts = row_devices(mesh), len(k if prefix is None else prefix[0])
    whole = prompts == devices if pieces > 1 else prompts % devices == 0
    return (
        whole
        and math.gcd(q.shape[0], devices) == devices
        and math.gcd(q.shape[2], k.shape[2]) % mesh.shape["tensor"] == 0
    )


def attend(
    kernel: Kernel,
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    segment_ids: Int[Array, "b t"] | None,
    prefix: Prefix | None,
    prefix_mask: Bool[Array, "p s"] | None,
    pieces: int,
) -> Float[Array, "b t n h"]:
    """`kernel(q, k, v, segment_ids=, prefix=, prefix_mask=)` on every device of the mesh that is set. `pieces` as in `attention.attend`."""
    mesh = current_mesh()
    assert mesh is not None
    blocks = [[*range(first, first + pieces)] for first in range(0, row_devices(mesh), pieces)]

    def local(q, k, v, segments, prefix, mask):
        if pieces == 1:
            return kernel(q, k, v, segment_ids=segments, prefix=prefix, prefix_mask=mask)
        if prefix is None:
            return _own(kernel, q, k, v, segments, blocks)
        prefix, mask = jax.tree.map(lambda x: _gather(x, blocks), (prefix, mask))
        return kernel(q, k, v, segment_ids=segments, prefix=prefix, prefix_mask=mask)

    arrays = q, k, v, segment_ids, prefix, prefix_mask
    heads = PartitionSpec(*BATCH, None, "tensor")
    specs = jax.tree.map(lambda x: heads if x.ndim == 4 else BATCH, arrays)
    return jax.shard_map(local, in_specs=specs, out_specs=heads, check_vma=False)(*arrays)


def join(
    kernel: Kernel,
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    segment_ids: Int[Array, "b t"] | None,
    prefix: Prefix | None,
    prefix_mask: Bool[Array, "p s"] | None,
    pieces: int,
) -> Float[Array, "b t n h"]:
    """The same without a mesh: pieces are put together."""

    def whole(arrays: Any) -> Any:
        return jax.tree.map(lambda x: x.reshape(len(x) // pieces, -1, *x.shape[2:]), arrays)

    if prefix is None:
        (queries, k, v, segment_ids) = whole((q, k, v, segment_ids))
        return kernel(
            queries, k, v, segment_ids=segment_ids, prefix=None, prefix_mask=None
        ).reshape(q.shape)
    prefix, prefix_mask = whole((prefix, prefix_mask))
    return kernel(q, k, v, segment_ids=segment_ids, prefix=prefix, prefix_mask=prefix_mask)


def _own(
    kernel: Kernel,
    q: Float[Array, "1 t n h"],
    k: Float[Array, "1 t k h"],
    v: Float[Array, "1 t k h"],
    segments: Int[Array, "1 t"] | None,
    blocks: list[list[int]],
) -> Float[Array, "1 t n h"]:
    """A piece's attention to its whole prompt. Where heads cannot be shared out every device computes all of them."""
    pieces, t, n, kv = len(blocks[0]), q.shape[1], q.shape[2], k.shape[2]
    segments = None if segments is None else _gather(segments, blocks)
    if n % pieces or (kv % pieces and pieces % kv):
        out = kernel(
            *(_gather(x, blocks) for x in (q, k, v)),
            segment_ids=segments,
            prefix=None,
            prefix_mask=None,
        )
        return jax.lax.dynamic_slice_in_dim(out, jax.lax.axis_index(ROWS) % pieces * t, t, 1)

    def swap(x: Array, cut: int, joined: int) -> Array:
        return jax.lax.all_to_all(x, ROWS, cut, joined, axis_index_groups=blocks, tiled=True)

    k, v = (x if kv % pieces == 0 else jnp.repeat(x, pieces // kv, axis=2) for x in (k, v))
    out = kernel(
        *(swap(x, 2, 1) for x in (q, k, v)), segment_ids=segments, prefix=None, prefix_mask=None
    )
    return swap(out, 1, 2)


def _gather(x: Array, blocks: list[list[int]]) -> Array:
    """All pieces of a prompt, one after the other."""
    return jax.lax.all_gather(x, ROWS, axis=1, axis_index_groups=blocks, tiled=True)
