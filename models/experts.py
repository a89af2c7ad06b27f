"""A mixture of experts in place of a layer's MLP: every token goes to a few of them.

Over a mesh, the experts are divided over `tensor`, whose devices share a row's tokens. Each device
computes its experts' share of the output, and a psum adds the shares.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.config import TextConfig
from models.layers import PRODUCT, normal, product
from models.sharding import ROWS, current_mesh, on_devices, row_devices


class Experts(nnx.Module):
    """Router and experts of all layers, stacked along a leading axis; a call takes one layer.

    An expert is a gated MLP. Its matrices `gate` and `up` lie side by side.
    """

    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike):
        assert config.experts is not None
        layers, d = config.num_hidden_layers, config.hidden_size
        count, f = config.experts.num_experts, config.experts.moe_intermediate_size
        self.per_token = config.experts.num_experts_per_tok
        axes = ("layer", "expert", "expert_in", "expert_out")
        self.router = normal(
            rngs, (layers, d, count), ("layer", "embed", "router"), d**-0.5, param_dtype
        )
        self.gate_up = normal(rngs, (layers, count, d, 2 * f), axes, d**-0.5, param_dtype)
        self.down = normal(rngs, (layers, count, f, d), axes, f**-0.5, param_dtype)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Return the output of one layer."""
        router = self.router[...]
        # Rounded before they are gathered.
        gate_up, down = (weight[...].astype(x.dtype) for weight in (self.gate_up, self.down))
        mesh = current_mesh()
        if mesh is None:
            return _mixture(x, router, gate_up, down, self.per_token, 0).astype(x.dtype)

        def share(x: Array, router: Array, gate_up: Array, down: Array) -> Array:
            gate_up, down = (
                jax.lax.all_gather(weight, "fsdp", axis=1, tiled=True) for weight in (gate_up, down)
            )
            first = jax.lax.axis_index("tensor") * gate_up.shape[0]
            out = _mixture(x, router, gate_up, down, self.per_token, first)
            return jax.lax.psum(out, "tensor")

        # The compiler cannot divide products of unequal groups. Here each device runs its own.
        by_row = PartitionSpec(ROWS if len(x) % row_devices(mesh) == 0 else None)
        by_expert, whole = PartitionSpec("tensor", "fsdp"), PartitionSpec()
        divided = on_devices(share, (by_row, whole, by_expert, by_expert), by_row)
        return divided(x, router, gate_up, down).astype(x.dtype)


def _route(
    tokens: Float[Array, "n d"], router: Float[Array, "d e"], per_token: int
) -> tuple[Float[Array, "n k"], Int[Array, "n k"]]:
    """Return the experts of each token, likeliest first, and their shares, which add up to 1."""
    logits = checkpoint_name(product(tokens, router), PRODUCT)
    scores = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    shares, chosen = jax.lax.top_k(scores, per_token)
    return (shares / shares.sum(-1, keepdims=True)).astype(tokens.dtype), chosen


def _mixture(
    x: Float[Array, "b t d"],
    router: Float[Array, "d e"],
    gate_up: Float[Array, "m d two_f"],
    down: Float[Array, "m f d"],
    per_token: int,
    first_expert: int | Int[Array, ""],
) -> Float[Array, "b t d"]:
    """Return the share of m experts, from `first_expert` on, in the output, float32."""
    tokens = x.reshape(-1, x.shape[-1])
    shares, chosen = _route(tokens, router, per_token)
    count = len(gate_up)
    local = chosen - first_expert
    local = jnp.where((local >= 0) & (local < count), local, count).ravel()
    # Sorted by expert, so that an expert's tokens are one block. Those of other devices come last.
    order = jnp.argsort(local, stable=True)
    sizes = jnp.bincount(local, length=count + 1)[:count]
    # Nothing is known of tokens behind the last block. They are replaced wherever they could reach
    # a result or, as 0 times NaN, a gradient.
    known = (local[order] < count)[:, None]
    inputs = jnp.where(known, jnp.repeat(tokens, per_token, axis=0)[order], 0)
    hidden = jnp.where(known, jax.lax.ragged_dot(inputs, gate_up, sizes), 0)
    gate, up = jnp.split(checkpoint_name(hidden, PRODUCT), 2, axis=-1)
    outputs = jax.lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes)
    outputs = jnp.where(known, outputs, 0)
    # Back in the order of tokens, and summed in that of experts: the same bits in every run.
    outputs = outputs[jnp.argsort(order)].reshape(*shares.shape, -1) * shares[..., None]
    return outputs.astype(jnp.float32).sum(axis=1).reshape(x.shape)
