"""A mixture of experts in place of a layer's MLP: every token goes to a few of them.

Over a mesh, the experts are divided over `tensor`, whose devices share a row's tokens: each device
computes what its experts add, and the sums are added up.
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
from models.layers import normal, product
from models.remat import PRODUCT
from models.sharding import ROWS, current_mesh, row_devices


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
            rngs, (layers, d, count), ("layer", "embed", "norm"), d**-0.5, param_dtype
        )
        self.gate_up = normal(rngs, (layers, count, d, 2 * f), axes, d**-0.5, param_dtype)
        self.down = normal(rngs, (layers, count, f, d), axes, f**-0.5, param_dtype)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        weights = (self.router[...], self.gate_up[...], self.down[...])
        mesh = current_mesh()
        if mesh is None:
            return checkpoint_name(_mixture(x, *weights, self.per_token, 0), PRODUCT)

        def share(x: Array, router: Array, gate_up: Array, down: Array) -> Float[Array, "b t d"]:
            first = jax.lax.axis_index("tensor") * gate_up.shape[0]
            return jax.lax.psum(_mixture(x, router, gate_up, down, self.per_token, first), "tensor")

        # The compiler cannot divide products of unequal groups. Here each device runs its own.
        rows = PartitionSpec(ROWS if len(x) % row_devices(mesh) == 0 else None)
        mine, whole = PartitionSpec("tensor"), PartitionSpec()
        divided = jax.shard_map(
            share, in_specs=(rows, whole, mine, mine), out_specs=rows, check_vma=False
        )
        return checkpoint_name(divided(x, *weights), PRODUCT)


def choose(
    rows: Float[Array, "n d"], router: Float[Array, "d e"], per_token: int
) -> tuple[Float[Array, "n k"], Int[Array, "n k"]]:
    """The experts of each token, likeliest first, and their shares, which add up to 1."""
    scores = jax.nn.softmax(product(rows, router).astype(jnp.float32), axis=-1)
    shares, chosen = jax.lax.top_k(scores, per_token)
    return (shares / shares.sum(-1, keepdims=True)).astype(rows.dtype), chosen


def _mixture(
    x: Float[Array, "b t d"],
    router: Float[Array, "d e"],
    gate_up: Float[Array, "m d two_f"],
    down: Float[Array, "m f d"],
    per_token: int,
    first: int | Int[Array, ""],
) -> Float[Array, "b t d"]:
    """What the experts `first`, `first` + 1, ... (m of them) add for every token."""
    rows = x.reshape(-1, x.shape[-1])
    shares, chosen = choose(rows, router, per_token)
    count = len(gate_up)
    # Number of the expert here; `count` for those of other devices.
    here = jnp.where((chosen >= first) & (chosen < first + count), chosen - first, count).ravel()
    # Sorted by expert, so that an expert's tokens are one block; those without an expert come last.
    order = jnp.argsort(here, stable=True)
    token = order // per_token
    sizes = jnp.bincount(here, length=count + 1)[:count]
    gate, up = jnp.split(
        jax.lax.ragged_dot(rows[token], gate_up.astype(x.dtype), sizes), 2, axis=-1
    )
    added = jax.lax.ragged_dot(jax.nn.silu(gate) * up, down.astype(x.dtype), sizes)
    added = added * shares.ravel()[order][:, None]
    added = jnp.where((here[order] < count)[:, None], added, 0)
    return jnp.zeros_like(rows).at[token].add(added).reshape(x.shape)
