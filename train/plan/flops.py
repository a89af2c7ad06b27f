"""FLOPs of a traced program: matrix products, counted as often as they run.

Owns the walk: a scan's body counts once a turn, a shard_map's once a device, of a branch the dearest counts, what nobody uses does not.
What a Pallas kernel does cannot be read from its code (it skips what its mask leaves out), so attention's kernels are added by formula.
Refuses kernels without one, and convolutions. Invariant: element-wise work counts for nothing, so that the figure can be held against a
peak of matrix units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

Pairs = Callable[
    [int, int], float
]  # (queries, keys) of one sequence -> how many pairs of them a kernel computes
# Matrix products of [queries, keys, head_dim] in each of Splash's kernels: the scores again, then what the kernel is for.
SPLASH = {"fwd": 2, "dkv": 4, "dq": 3}


def count_flops(
    jaxpr: ClosedJaxpr | Jaxpr, *, turns: float = 1.0, pairs: Pairs | None = None
) -> float:
    """FLOPs of all devices together. `turns`: how often the bodies of while-loops run, whose number the program does not say.

    `pairs`: what attention's kernels compute of one sequence (None: there are none). ValueError for what cannot be counted.
    """
    total, inner = 0.0, jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    for eqn in _used(inner):
        name, below = (
            eqn.primitive.name,
            [count_flops(x, turns=turns, pairs=pairs) for x in _bodies(eqn)],
        )
        if name == "dot_general":
            total += _product(eqn)
        elif name == "pallas_call":
            total += _kernel(eqn, pairs)
        elif name == "conv_general_dilated":
            raise ValueError(
                "count_flops: a convolution; only products are counted, write it as one or add its formula"
            )
        elif name == "scan":
            total += eqn.params["length"] * sum(below)
        elif name == "while":
            total += turns * sum(below)
        elif name == "cond":
            total += max(below)
        elif name == "shard_map":
            total += math.prod(
                eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"]
            ) * sum(below)
        else:
            total += sum(below)
    return total


def causal(queries: int, keys: int) -> float:
    """Pairs where each query sees itself and what is before; the queries are the last of the keys."""
    return queries * (keys - queries) + queries * (queries + 1) / 2


def pairs_of_rows(length: int) -> Pairs:
    """Pairs where `queries` are rows of `length` tokens, one after the other, behind keys that all of them see."""

    def pairs(queries: int, keys: int) -> float:
        # Tiles may add some keys and queries; a sequence of less than a row's length is a prompt, and its own.
        row = length if queries >= length and keys > queries else queries
        return queries * (keys - queries) + queries * (row + 1) / 2

    return pairs


def every(queries: int, keys: int) -> float:
    """All pairs: nothing is masked."""
    return float(queries * keys)


def _used(jaxpr: Jaxpr) -> list[Any]:
    """Equations whose results are used. jax keeps kernels that are not (where what they gave was saved), the compiler leaves them out."""
    needed, found = {x for x in jaxpr.outvars if isinstance(x, Var)}, []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(x for x in eqn.invars if isinstance(x, Var))
            found.append(eqn)
    return found


def _bodies(eqn: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    """The programs inside an equation. A kernel's own are left alone."""
    if eqn.primitive.name == "pallas_call":
        return
    for value in eqn.params.values():
        for leaf in value if isinstance(value, tuple | list) else (value,):
            if isinstance(leaf, ClosedJaxpr | Jaxpr):
                yield leaf


def _product(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * depth


def _kernel(eqn: Any, pairs: Pairs | None) -> float:
    name = str(eqn.params["name"])
    kind = next((kind for kind in SPLASH if name.startswith(f"splash_mha_{kind}")), None)
    shapes = [
        x.aval.shape
        for x in eqn.invars
        if len(x.aval.shape) >= 3 and jnp.issubdtype(x.aval.dtype, jnp.floating)
    ]
    if kind is not None and pairs is not None:
        *batch, heads, queries, size = shapes[0]
        return 2.0 * SPLASH[kind] * math.prod(batch) * heads * size * pairs(queries, shapes[1][-2])
    if "ragged_paged_attention" in name and pairs is not None:
        # Queries [row, head, size]; a row's keys lie on its pages: `pairs` knows how many, of all the rows.
        rows, heads, size = next(shape for shape in shapes if len(shape) == 3)
        return 4.0 * heads * size * pairs(rows, 0)
    raise ValueError(
        f"count_flops: the kernel {name!r} has no formula here; add one, or say with `pairs` what it computes"
    )
