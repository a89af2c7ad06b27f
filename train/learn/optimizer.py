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
    """AdamW as published (REFERENCE 3, step 5), or Muon for matrices with AdamW for the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    """AdamW for all weights, or Muon for matrices with AdamW for the rest."""
    learning_rate: float = 2e-6
    """Peak learning rate of AdamW."""
    muon_learning_rate: float = 0.02
    """Peak learning rate of Muon, where it is used."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or cosine decay to zero at the last step."""
    warmup: float = 0.0
    """Share of the steps over which the learning rate rises linearly from zero."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    b1: float = 0.9
    """Decay rate of AdamW's first moment."""
    b2: float = 0.999
    """Decay rate of AdamW's second moment."""
    eps: float = 1e-8
    """Added to denominators: AdamW's root of the second moment, Muon's norm."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the first moment and of Muon's momentum; the second moment has the weights' type."""

    def __post_init__(self):
        for name, choices in (
            ("name", ("adamw", "muon")),
            ("schedule", ("constant", "cosine")),
            ("moment_dtype", ("float32", "bfloat16")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"OptimizerSettings.{name}: {getattr(self, name)!r} is unknown; choose one of {', '.join(choices)}"
                )
        for name in ("learning_rate", "muon_learning_rate", "eps", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"OptimizerSettings.{name}: {getattr(self, name)}; give a finite number above 0"
                )
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"OptimizerSettings.weight_decay: {self.weight_decay}; give a finite number of at least 0"
            )
        for name in ("warmup", "b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"OptimizerSettings.{name}: {getattr(self, name)}; give a number from 0 to below 1"
                )


def require_counts(room: str, **counts: int) -> None:
    """Raises ValueError for a count below 1, naming its field."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{room}.{name}: {value}; give a whole number of at least 1")


def make_optimizer(settings: OptimizerSettings, steps: int) -> optax.GradientTransformation:
    """The optimiser of `steps` updates, gradients clipped by their global norm first."""

    def rate(peak: float) -> optax.Schedule | float:
        warmup = round(settings.warmup * steps)
        if settings.schedule == "cosine" and steps > 1:
            # Optax needs a step of each; the last step of the warm-up leaves one to decay in.
            return optax.warmup_cosine_decay_schedule(
                0.0, peak, min(max(1, warmup), steps - 1), steps
            )
        return optax.warmup_constant_schedule(0.0, peak, warmup) if warmup else peak

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


def _muon(
    settings: OptimizerSettings, rate: Callable[[float], optax.Schedule | float]
) -> optax.GradientTransformation:
    return optax.contrib.muon(
        rate(settings.muon_learning_rate),
        weight_decay=settings.weight_decay,
        eps=settings.eps,
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
    axes = {
        "q": numbers(1, (2, 3)),
        "k": numbers(1, (2, 3)),
        "v": numbers(1, (2, 3)),
        "o": numbers((1, 2), 3),
    }
    axes |= dict.fromkeys(("gate", "up", "down"), numbers(1, 2))
    return jax.tree_util.tree_map_with_path(lambda path, _: axes.get(_name(path)), weights)


def _name(path: tuple[Any, ...]) -> str:
    """The parameter's own name in a path like layers/q/value."""
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return names[1] if names[0] == "layers" else ""
