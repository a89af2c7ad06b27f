"""Counts the FLOPs of a traced program: its matrix products, as often as they run.

Element-wise work is left out, so the count can be compared with the peak of the matrix units. The
work of a Pallas attention kernel cannot be read from its code, because it skips blocks that are
masked out. Attention kernels are therefore counted by formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

Pairs = Callable[[int, int], float]
"""(queries, keys) of one sequence -> query-key pairs that an attention kernel computes."""

# Matrix products per query-key pair in the kernels of Splash and of packed rows. Forward: the
# scores q k, and the weighted values. Backward: both kernels compute the scores again. The
# gradients of keys add dv, dp and dk; those of queries add dp and dq.
KERNELS = {
    "splash_mha_fwd": 2,
    "splash_mha_dkv": 4,
    "splash_mha_dq": 3,
    "packed_attention_forward": 2,
    "packed_attention_d_keys": 4,
    "packed_attention_d_queries": 3,
}


def count_flops(
    jaxpr: ClosedJaxpr | Jaxpr,
    *,
    trip_count: float = 1.0,
    pairs: Pairs | None = None,
    expert_devices: int = 1,
) -> float:
    """Counts the FLOPs of all devices together.

    Args:
        jaxpr: the traced program.
        trip_count: iterations of while-loops, whose number a program does not state.
        pairs: query-key pairs of one sequence that attention kernels compute; None if the program
            has no such kernels.
        expert_devices: devices that divide the experts; each has all rows, and computes its part.

    Raises:
        ValueError: the program has a convolution, or a kernel without a formula.
    """
    total = 0.0
    for eqn in _used_equations(jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr):
        name = eqn.primitive.name
        experts = (
            eqn.params["mesh"].shape.get("tensor", 1) if name == "shard_map" else expert_devices
        )
        inner = [
            count_flops(x, trip_count=trip_count, pairs=pairs, expert_devices=experts)
            for x in _inner_programs(eqn)
        ]
        if name == "dot_general":
            total += _matrix_product(eqn)
        elif name.startswith("ragged_dot"):
            total += _grouped_product(eqn) / expert_devices
        elif name == "pallas_call":
            total += _attention_kernel(eqn, pairs)
        elif name == "conv_general_dilated":
            raise ValueError(
                "count_flops: a convolution; write it as a matrix product or add its formula"
            )
        elif name == "scan":
            total += eqn.params["length"] * sum(inner)
        elif name == "while":
            total += trip_count * sum(inner)
        elif name == "cond":
            # Either branch may run; count the more expensive one.
            total += max(inner)
        elif name == "shard_map":
            # The body is the program of one device. Axes that an outer shard_map has already split
            # are counted there.
            mesh_shape = eqn.params["mesh"].shape
            devices = math.prod(mesh_shape[axis] for axis in eqn.params["newly_manual_axes"])
            total += devices * sum(inner)
        else:
            total += sum(inner)
    return total


def causal(queries: int, keys: int) -> float:
    """Pairs of causal attention, where the queries are the last of the keys."""
    before = keys - queries
    return queries * before + queries * (queries + 1) / 2


def pairs_of_rows(length: int) -> Pairs:
    """Pairs of packed rows that share a prefix.

    The queries are rows of `length` tokens, one after another. Each row sees the whole prefix and
    its own tokens causally, but not the other rows:

        keys     prefix | row 0 | row 1
        row 0      all  |  tri  |   -
        row 1      all  |   -   |  tri
    """

    def pairs(queries: int, keys: int) -> float:
        prefix = keys - queries
        # Fewer queries than a row, or no prefix: this is the prompt itself, one causal sequence.
        # Compare with >= because tiling may pad the queries.
        row = length if queries >= length and prefix > 0 else queries
        return queries * prefix + queries * (row + 1) / 2

    return pairs


def every(queries: int, keys: int) -> float:
    """All pairs, for attention without a mask."""
    return float(queries * keys)


def _used_equations(jaxpr: Jaxpr) -> list[Any]:
    """The equations whose results are used.

    Differentiation may leave forward kernels in a jaxpr whose results are saved elsewhere. The
    compiler removes them, so they do not count.
    """
    needed = {x for x in jaxpr.outvars if isinstance(x, Var)}
    used = []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(x for x in eqn.invars if isinstance(x, Var))
            used.append(eqn)
    return used


def _inner_programs(eqn: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    """The programs inside an equation: loop bodies, branches, called functions."""
    # A kernel's body is the program of one block; it is counted by formula instead.
    if eqn.primitive.name == "pallas_call":
        return
    for value in eqn.params.values():
        for leaf in value if isinstance(value, tuple | list) else (value,):
            if isinstance(leaf, ClosedJaxpr | Jaxpr):
                yield leaf


def _matrix_product(eqn: Any) -> float:
    """2 x (result size) x (contracted size): a multiplication and an addition each."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * depth


def _grouped_product(eqn: Any) -> float:
    """2 x rows x width x width of the groups' matrices, of which every row meets one."""
    rows, width = eqn.invars[0].aval.shape
    # The last axis of the result, which are rows, or the gradients of the groups' matrices.
    return 2.0 * rows * width * eqn.outvars[0].aval.shape[-1]


def _attention_kernel(eqn: Any, pairs: Pairs | None) -> float:
    """2 x (products per pair) x heads x head_dim x pairs, over the batch."""
    name = str(eqn.params["name"])
    shapes = [
        x.aval.shape
        for x in eqn.invars
        if len(x.aval.shape) >= 3 and jnp.issubdtype(x.aval.dtype, jnp.floating)
    ]
    for kernel, products in KERNELS.items():
        if pairs is not None and name.startswith(kernel):
            # Queries [..., heads, queries, head_dim], keys [..., heads, keys, head_dim].
            *batch, heads, queries, head_dim = shapes[0]
            keys = shapes[1][-2]
            return 2.0 * products * math.prod(batch) * heads * head_dim * pairs(queries, keys)
    if "ragged_paged_attention" in name and pairs is not None:
        # Queries [rows, heads, head_dim]. The keys are on pages, so the kernel's arguments do not
        # show their number: `pairs` gives it for all rows together. Two products per pair.
        rows, heads, head_dim = next(shape for shape in shapes if len(shape) == 3)
        return 4.0 * heads * head_dim * pairs(rows, 0)
    raise ValueError(
        f"count_flops: the kernel {name!r} has no formula; add one here, or give `pairs`"
    )
