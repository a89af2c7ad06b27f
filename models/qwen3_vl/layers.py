"""What both towers are made of: parameters that know the names of their axes, and the two norms.

Invariant: every parameter carries `axes`, one logical name a dimension, which `models.sharding` lays over a mesh. Parameters of
stacked layers are made with a leading `layer` axis and used one slice at a time, inside a scan.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], std: float, dtype: DTypeLike
) -> nnx.Param:
    """A parameter drawn from N(0, std^2)."""
    return nnx.Param(
        (jax.random.normal(rngs.params(), shape, jnp.float32) * std).astype(dtype),
        axes=_checked(shape, axes),
    )


def constant(
    value: float, shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike
) -> nnx.Param:
    """A parameter that starts as `value` everywhere: norms' scales and biases."""
    return nnx.Param(jnp.full(shape, value, dtype), axes=_checked(shape, axes))


def _checked(shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[str, ...]:
    if len(shape) != len(axes):
        raise ValueError(f"axes = {axes}: one name a dimension of {shape}; add or remove names")
    return axes


def product(x: Float[Array, "*n i"], weight: Float[Array, "i *o"]) -> Float[Array, "*n *o"]:
    """x times a weight, in x's type. The rows form one axis: over more, XLA on CPU copies what a weight's gradient is made of."""
    flat = jnp.tensordot(x.reshape(-1, x.shape[-1]), weight.astype(x.dtype), 1)
    return flat.reshape(*x.shape[:-1], *weight.shape[1:])


def rms_norm(x: Float[Array, "*n d"], scale: nnx.Param, eps: float) -> Float[Array, "*n d"]:
    """Root-mean-square norm over the last axis, statistics in float32. Rounds before it scales, as the published model does."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return scale[...].astype(x.dtype) * wide.astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm over the last axis with scale and bias, eps 1e-6, statistics in float32. `stack` leads with a layer axis."""

    def __init__(self, size: int, *, stack: tuple[int, ...], param_dtype: DTypeLike):
        axes = ("layer",) * len(stack) + ("norm",)
        self.scale = constant(1.0, (*stack, size), axes, param_dtype)
        self.bias = constant(0.0, (*stack, size), axes, param_dtype)

    def __call__(self, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
        return (
            wide * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        ).astype(x.dtype)


class Linear(nnx.Module):
    """`x @ kernel + bias`, kernel [d_in, d_out], drawn with the variance 1 / d_in. `stack` leads with a layer axis."""

    def __init__(
        self,
        shape: tuple[int, int],
        axes: tuple[str, str],
        *,
        stack: tuple[int, ...],
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ):
        lead = ("layer",) * len(stack)
        self.kernel = normal(rngs, (*stack, *shape), (*lead, *axes), shape[0] ** -0.5, param_dtype)
        self.bias = constant(0.0, (*stack, shape[1]), (*lead, axes[1]), param_dtype)

    def __call__(self, x: Float[Array, "*n i"]) -> Float[Array, "*n o"]:
        return x @ self.kernel[...].astype(x.dtype) + self.bias[...].astype(x.dtype)
