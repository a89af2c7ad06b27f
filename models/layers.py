"""Building blocks of both towers: parameters with named axes, products, norms, linear layers.

Every parameter carries the metadata `axes`, one logical name per dimension, which `models.sharding`
maps to mesh axes. The parameters of equal layers are created as one stack with a leading `layer`
axis and used one slice at a time, inside a scan.

A policy (`Remat`) says what each layer keeps for the backward pass. It trades memory for time, and
never changes a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from models.attention import SAVED

Remat = Literal["auto", "none", "full", "attention", "dots", "offload"]
"""What is kept of each layer:

auto: chosen for the devices, before a program is built, from the others.
none: everything.
full: only its input; the layer is computed again.
attention: its input and the output of attention (cuDNN computes the output again anyway).
dots: its input, the output of attention, and the products with weights, adapters included.
offload: its input, in the host's memory. On CPU that is the same memory.
"""

# Name of a layer's input. It belongs at the entry of the checkpointed body: at the end of the body,
# offloading has no effect.
LAYER_INPUT = "layer_in"
# Name of the product of an input and a weight, with what the weight's adapter adds. Saving all
# matrix products instead would keep both terms of that sum.
PRODUCT = "product"


def normal(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    std: float,
    dtype: DTypeLike,
    **metadata: Any,
) -> nnx.Param:
    """Return a parameter drawn from N(0, std^2).

    It is drawn in float32 and then rounded, so that every `dtype` starts from the same numbers.
    The parameter has `axes` and `metadata` as its metadata.
    """
    values = jax.random.normal(rngs.params(), shape, jnp.float32) * std
    return nnx.Param(values.astype(dtype), axes=axes, **metadata)


def constant(
    value: float, shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike
) -> nnx.Param:
    """Return a parameter filled with `value`, for the scales and biases of norms."""
    return nnx.Param(jnp.full(shape, value, dtype), axes=axes)


def product(x: Float[Array, "*n i"], weight: Float[Array, "i *o"]) -> Float[Array, "*n *o"]:
    """Return x times a weight, in x's type."""
    # All vectors along one axis: with more axes, XLA on CPU copies the operands of the weight's
    # gradient.
    vectors = x.reshape(-1, x.shape[-1])
    out = jnp.tensordot(vectors, weight.astype(x.dtype), 1)
    return out.reshape(*x.shape[:-1], *weight.shape[1:])


def rms_norm(x: Float[Array, "*n d"], scale: nnx.Param, eps: float) -> Float[Array, "*n d"]:
    """Normalise by the root mean square over the last axis, with statistics in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    # The published model rounds before it scales. The other order gives other bfloat16 numbers.
    return _last_axis(scale[...].astype(x.dtype), x) * wide.astype(x.dtype)


def _last_axis(vector: Float[Array, " d"], like: Float[Array, "*n d"]) -> Float[Array, "... d"]:
    """Reshape [d] to [1, ..., 1, d], with the rank of `like`."""
    return jax.lax.broadcast_to_rank(vector, like.ndim)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis with a scale, eps 1e-6; see `rms_norm`.

    `stack` is (layers,) for a stack of norms, or () for a single one.
    """

    def __init__(self, size: int, *, stack: tuple[int, ...], param_dtype: DTypeLike):
        axes = ("layer",) * len(stack) + ("norm",)
        self.scale = constant(1.0, (*stack, size), axes, param_dtype)

    def __call__(self, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        return rms_norm(x, self.scale, 1e-6)


class LayerNorm(nnx.Module):
    """Layer norm over the last axis with scale and bias, eps 1e-6, and statistics in float32.

    `stack` is (layers,) for a stack of norms, or () for a single one.
    """

    def __init__(self, size: int, *, stack: tuple[int, ...], param_dtype: DTypeLike):
        axes = ("layer",) * len(stack) + ("norm",)
        self.scale = constant(1.0, (*stack, size), axes, param_dtype)
        self.bias = constant(0.0, (*stack, size), axes, param_dtype)

    def __call__(self, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
        scale = _last_axis(self.scale[...].astype(jnp.float32), x)
        bias = _last_axis(self.bias[...].astype(jnp.float32), x)
        return (wide * scale + bias).astype(x.dtype)


class Linear(nnx.Module):
    """`x @ kernel + bias`, with a kernel [d_in, d_out] drawn with variance 1 / d_in.

    `bias=False` omits the bias.

    `stack` is (layers,) for a stack of linear layers, or () for a single one.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        axes: tuple[str, str],
        *,
        stack: tuple[int, ...],
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        bias: bool = True,
    ):
        lead = ("layer",) * len(stack)
        std = shape[0] ** -0.5
        self.kernel = normal(rngs, (*stack, *shape), (*lead, *axes), std, param_dtype)
        zeros = constant(0.0, (*stack, shape[1]), (*lead, axes[1]), param_dtype) if bias else None
        self.bias = zeros

    def __call__(self, x: Float[Array, "*n i"]) -> Float[Array, "*n o"]:
        out = x @ self.kernel[...].astype(x.dtype)
        if self.bias is None:
            return out
        return out + _last_axis(self.bias[...].astype(x.dtype), out)


def rematerialise(body: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Apply a policy, which is not "auto", to the body of a scan over layers."""
    if remat == "none":
        return body
    policies = jax.checkpoint_policies
    policy = {
        "full": None,
        "attention": policies.save_only_these_names(SAVED),
        "dots": policies.save_only_these_names(SAVED, PRODUCT),
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[remat]
    # `prevent_cse` adds barriers, so that XLA does not merge the recomputation with the forward
    # pass. Inside a scan it cannot merge them anyway, and the barriers would cost time.
    return jax.checkpoint(body, prevent_cse=False, policy=policy)
