"""The vision tower as it is kept on devices to encode frames."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike


def frozen(weights: nnx.State, dtype: DTypeLike) -> nnx.State:
    """The weights of a tower that computes in `dtype` and has no gradients here.

    Kernels are stored in `dtype`, to which the tower would round them anyway. All other weights
    keep their type: norms and positions are used in float32. Weights may be abstract.
    """

    def one(path: tuple, variable: nnx.Variable) -> Any:
        if path[-1] != "kernel":
            return variable
        value = variable.get_value()
        if isinstance(value, jax.ShapeDtypeStruct):
            return variable.replace(value.update(dtype=dtype))
        return variable.replace(value.astype(dtype))

    return nnx.map_state(one, weights)
