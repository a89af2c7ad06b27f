"""The optimizers of the recipes, built from optax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.typing import DTypeLike

from paravt_jax.checks import require_above, require_at_least, require_choices

# As published; AdamW's decay rates are the usual ones, 0.9 and 0.999.
_MAX_GRAD_NORM = 1.0
# Added to denominators: the root of AdamW's second moment, and Muon's norm.
EPS = 1e-8
# Muon moves every matrix by as much as its learning rate says, so it takes a larger one than AdamW.
_MUON_FACTOR = 20 / 3
# Of AdamW's second moment beside Muon, whose runs are short.
_MUON_B2 = 0.95

Schedule = Callable[[float], optax.Schedule | float]
"""Returns the learning rate by step, given its peak."""


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """AdamW as published, or Muon for matrices and AdamW for the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw: AdamW for all weights. muon: Muon for the matrices of layers, AdamW for the rest."""
    learning_rate: float = 2e-6
    """Peak learning rate of AdamW. That of Muon is 20/3 of it."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""

    def __post_init__(self):
        section = "optimizer"
        require_choices(section, self)
        require_above(section, self, 0, "learning_rate")
        require_at_least(section, self, 0, "weight_decay")


def make_optimizer(
    settings: OptimizerSettings,
    moment_dtype: DTypeLike = jnp.float32,
    schedule: Schedule = lambda peak: peak,
) -> optax.GradientTransformation:
    """Return the optimizer. It clips gradients by their global norm first.

    Args:
        settings: Which optimizer, and its peak learning rate.
        moment_dtype: Type of AdamW's first moment and Muon's momentum. RL gives that of the
            activations, to save memory. The second moment has the weights' type.
        schedule: The learning rate by step; constant by default.
    """
    clip = optax.clip_by_global_norm(_MAX_GRAD_NORM)
    rate, decay = schedule(settings.learning_rate), settings.weight_decay
    if settings.name == "adamw":
        steps = optax.adamw(rate, eps=EPS, mu_dtype=moment_dtype, weight_decay=decay)
    else:
        steps = optax.contrib.muon(
            schedule(_MUON_FACTOR * settings.learning_rate),
            weight_decay=decay,
            eps=EPS,
            mu_dtype=moment_dtype,
            adam_b2=_MUON_B2,
            adam_weight_decay=decay,
            adam_learning_rate=rate,
            muon_weight_dimension_numbers=_matrix_axes,
        )
    return optax.chain(clip, steps)


# Input axes (summed over) and output axes of each matrix. Axis 0 is the layer and in neither, so
# Muon treats the matrix of each layer by itself.
_AXES = {
    # [layer, embed, heads, head_dim]
    **dict.fromkeys(("q", "k", "v"), optax.contrib.MuonDimensionNumbers(1, (2, 3))),
    # [layer, heads, head_dim, embed]
    "o": optax.contrib.MuonDimensionNumbers((1, 2), 3),
    # [layer, in, out]
    **dict.fromkeys(("gate", "up", "down"), optax.contrib.MuonDimensionNumbers(1, 2)),
    # [layer, expert, in, out]
    "experts/gate_up": optax.contrib.MuonDimensionNumbers(2, 3),
    "experts/down": optax.contrib.MuonDimensionNumbers(2, 3),
}


def _matrix_axes(weights: Any) -> Any:
    """Return each weight's axes as Muon needs them; None for weights that AdamW updates."""

    def axes(path: tuple[Any, ...], _: Any) -> Any:
        # A path such as layers/q/value.
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        name = "/".join(names[1:3] if "experts" in names else names[1:2])
        return _AXES.get(name) if names[0] == "layers" else None

    return jax.tree_util.tree_map_with_path(axes, weights)
