"""What the algorithm reads: the arrays of a batch, and means over their masks.

Alignment: index t of log-probs, masks and advantages speaks of token t itself, given everything before it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paravt_jax.method.structure import Structure

Metrics = dict[str, Float[Array, ""]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GRPOBatch:
    """One batch: p prompts with g rollouts each, and b rows of tokens that these rollouts wrote.

    `rollout` says for each row which of the p * g rollouts it belongs to: a main agent's row each, and where sub-agents are trained,
    their rows too, with what their episode earned. `mask` marks the generated tokens that are trained on; log-probs elsewhere are
    ignored. `behaviour` and `reference` are log-probs under the weights that sampled (by the engine)
    and under those that the run is held to. `structure` is struct(o) of each row, from
    `paravt_jax.method.structure`. `rewards` and `anchor_rewards` are `Rewards.total` and `.anchor`,
    `compliant` is `Rewards.compliant`: whose tags `likelihood` rewards. `valid` is False for
    rollouts that count for nothing.
    """

    mask: Bool[Array, "b t"]
    behaviour: Float[Array, "b t"]
    reference: Float[Array, "b t"]
    rollout: Int[Array, " b"]
    structure: Structure
    rewards: Float[Array, "p g"]
    anchor_rewards: Float[Array, "p g"]
    valid: Bool[Array, "p g"]
    compliant: Bool[Array, "p g"]

    @property
    def trained(self) -> Bool[Array, "b t"]:
        """The generated tokens of valid rollouts."""
        return self.mask & self.of_rows(self.valid)[:, None]

    def check(self) -> None:
        """Raises ValueError where two arrays disagree about rows, tokens or rollouts. Values are not looked at, so it runs under jit."""
        (b, t), (p, g), s = self.mask.shape, self.rewards.shape, self.structure.positions.shape[-1]
        wanted = dict.fromkeys(("behaviour", "reference"), (b, t)) | dict.fromkeys(
            ("anchor_rewards", "valid", "compliant"), (p, g)
        )
        found = {name: getattr(self, name).shape for name in wanted} | {
            "rollout": self.rollout.shape
        }
        found |= {f"structure.{name}": x.shape for name, x in self.structure._asdict().items()}
        wanted |= {"rollout": (b,)} | {
            f"structure.{name}": (b, s) for name in self.structure._fields
        }
        for name, shape in wanted.items():
            if found[name] != shape:
                raise ValueError(
                    f"GRPOBatch.{name}: shape {found[name]}; with mask {(b, t)} (rows, tokens) and rewards {(p, g)} (prompts, rollouts of "
                    f"each) it has to be {shape}"
                )

    def of_rows(self, values: Array) -> Array:
        """What belongs to rollouts, [p, g], for each row, [b]."""
        return values.reshape(-1)[self.rollout]


class Totals(NamedTuple):
    """What the loss divides by. When a batch is split, each part is given the totals of the whole."""

    tokens: Float[Array, ""]
    structural: Float[Array, ""]


def masked_sum(x: Float[Array, "*s"], mask: Bool[Array, "*s"]) -> Float[Array, ""]:
    """Sum of x where mask; what stands elsewhere, NaN included, does not reach value or gradient."""
    return jnp.where(mask, x, 0.0).sum()


def masked_mean(
    x: Float[Array, "*s"], mask: Bool[Array, "*s"], total: Float[Array, ""] | None = None
) -> Float[Array, ""]:
    """Mean of x where mask, over `total` elements if given, else over the mask's; 0 where there are none."""
    return masked_sum(x, mask) / jnp.maximum(mask.sum() if total is None else total, 1)
