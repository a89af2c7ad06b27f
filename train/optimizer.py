"""Optimisers of the recipes, all optax's own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax
import optax.contrib


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """AdamW as published (REFERENCE 3, step 5), or Muon for matrices with AdamW for the rest.

    `learning_rate` is AdamW's, `muon_learning_rate` Muon's. `schedule` decays to zero over `steps` after `warmup` (a share of them).
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 2e-6
    muon_learning_rate: float = 0.02
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: float = 0.0
    weight_decay: float = 0.01
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the first moment (Muon's momentum too). The second is always float32: in bfloat16 a step of 1 - b2 = 0.001 rounds to nothing,
    and what is large once stays so; optax keeps it in the type of the weights."""

    def __post_init__(self):
        for name, choices in (
            ("name", ("adamw", "muon")),
            ("schedule", ("constant", "cosine")),
            ("moment_dtype", ("float32", "bfloat16")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"OptimizerSettings.{name}: {getattr(self, name)!r} is unknown; choose one of {', '.join(choices)}")
        for name in ("learning_rate", "muon_learning_rate", "eps", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"OptimizerSettings.{name}: {getattr(self, name)}; give a finite number above 0")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"OptimizerSettings.weight_decay: {self.weight_decay}; give a finite number of at least 0")
        for name in ("warmup", "b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"OptimizerSettings.{name}: {getattr(self, name)}; give a number from 0 to below 1")


def require_counts(room: str, **counts: int) -> None:
    """Raises ValueError for a count below 1, naming its field."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{room}.{name}: {value}; give a whole number of at least 1")


def make_optimizer(settings: OptimizerSettings, steps: int) -> optax.GradientTransformation:
    """The optimiser of `steps` updates, gradients clipped by their global norm first."""

    def rate(peak: float) -> optax.Schedule | float:
        if settings.schedule == "constant":
            return peak
        return optax.warmup_cosine_decay_schedule(0.0, peak, max(1, round(settings.warmup * steps)), steps)

    if settings.name == "adamw":
        inner = optax.adamw(
            rate(settings.learning_rate),
            settings.b1,
            settings.b2,
            settings.eps,
            mu_dtype=settings.moment_dtype,
            weight_decay=settings.weight_decay,
        )
    else:
        inner = _muon(settings, rate)
    return optax.chain(optax.clip_by_global_norm(settings.max_grad_norm), inner)


def _muon(settings: OptimizerSettings, rate: Callable[[float], optax.Schedule | float]) -> optax.GradientTransformation:
    return optax.contrib.muon(
        rate(settings.muon_learning_rate),
        weight_decay=settings.weight_decay,
        mu_dtype=settings.moment_dtype,
        adam_b1=settings.b1,
        adam_b2=settings.b2,
        adam_weight_decay=settings.weight_decay,
        adam_learning_rate=rate(settings.learning_rate),
        muon_weight_dimension_numbers=_matrices,
    )


def _matrices(weights: Any) -> Any:
    """Which weights are matrices a layer, and which of their axes are summed over; the embedding and the norms are not (None)."""
    numbers = optax.contrib.MuonDimensionNumbers
    axes = {"q": numbers(1, (2, 3)), "k": numbers(1, (2, 3)), "v": numbers(1, (2, 3)), "o": numbers((1, 2), 3)}
    axes |= dict.fromkeys(("gate", "up", "down"), numbers(1, 2))
    return jax.tree_util.tree_map_with_path(lambda path, _: axes.get(_name(path)), weights)


def _name(path: tuple[Any, ...]) -> str:
    """The parameter's own name in a path like layers/q/value."""
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return names[1] if names[0] == "layers" else ""
