"""The algorithm's numbers, and which of its variants a recipe uses. The defaults are the published recipe (REFERENCE 3)."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

Anchor = Literal["likelihood", "credit", "sequence", "none"]
Level = Literal["group", "batch", "none"]
KLKind = Literal["k1", "k2", "k3"]


def _require_one_of(owner: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"{owner}.{name}: {value!r} is unknown; choose one of {', '.join(choices)}"
        )


@dataclasses.dataclass(frozen=True)
class Normalisation:
    """(x - mean) / (std + epsilon): over what the mean and the standard deviation are taken; `none` leaves that part out."""

    mean: Level = "group"
    """What the mean is taken over."""
    std: Level = "group"
    """What the standard deviation is taken over."""
    leave_one_out: bool = False
    """Compare each value with the mean of the others."""

    def __post_init__(self):
        for name in ("mean", "std"):
            _require_one_of("Normalisation", name, getattr(self, name), get_args(Level))
        if self.leave_one_out and self.mean == "none":
            raise ValueError(
                "Normalisation.leave_one_out: True with mean 'none'; there is no mean to leave a value out of, set one"
            )


@dataclasses.dataclass(frozen=True)
class GRPOSettings:
    """Settings of advantages and loss.

    Anchors: `likelihood` makes the log-likelihood of struct(o) a term of the objective (the paper's
    formula), with gamma at violations. `credit` adds R_anchor to the advantages of struct(o) alone.
    `sequence` makes R_anchor part of the sequence reward (the release).
    """

    group_size: int = 8
    """Rollouts per prompt."""
    reward_bias: float = 0.2
    """Subtracted from a reward before scaling."""
    reward_scaling: float = 10.0
    """Factor on a reward before it is clipped and normalised in its group."""
    reward_clip: float | None = 20.0
    """Bound on scaled rewards, None for none: 20 saturates at R = 2.2 while 2.8 can be earned (REFERENCE 4, 14)."""
    reward_normalisation: Normalisation = Normalisation("group", "group")
    """Of the scaled rewards: in each group as published; `std="none"` and `leave_one_out` are Dr. GRPO's and RLOO's choices."""
    kl_coefficient: float = 0.01
    """Weight of the KL to the reference policy, as a token reward."""
    kl_kind: KLKind = "k1"
    """Estimator of that KL from one sample."""
    kl_clamp: float | None = 10.0
    """Bound on each token's KL estimate, None for none."""
    advantage_normalisation: Normalisation = Normalisation("batch", "batch")
    """Of the tokens' advantages: over all generated tokens of the batch as published."""
    ratio: Literal["token", "sequence"] = "token"
    """What the policy ratio is taken of: each token, or (GSPO) the geometric mean over a rollout's generated tokens."""
    behaviour_cap: float | None = 5.0
    """Tokens of a larger importance weight, exp(current - behaviour log-prob), are left out; None: no cap."""
    epsilon: float = 1e-5
    """Added to standard deviations."""
    anchor: Anchor = "sequence"
    """Where the format anchor acts: the objective, struct(o)'s advantages, the sequence reward, nowhere."""
    anchor_weight: float = 0.5
    """Weight of the anchor, wherever it acts."""

    def __post_init__(self):
        if self.group_size < 2:
            raise ValueError(
                f"GRPOSettings.group_size: {self.group_size} is too small; a group needs at least 2 rollouts to compare"
            )
        for name in ("reward_scaling", "reward_clip", "kl_clamp", "behaviour_cap", "epsilon"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(
                    f"GRPOSettings.{name}: {value} is no bound; give a finite number above 0"
                )
        for name in ("kl_coefficient", "anchor_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"GRPOSettings.{name}: {getattr(self, name)} is no weight; give a finite number of at least 0"
                )
        if not math.isfinite(self.reward_bias):
            raise ValueError(
                f"GRPOSettings.reward_bias: {self.reward_bias} is not finite; give a number, for instance 0.2"
            )
        for name, choices in (
            ("kl_kind", KLKind),
            ("ratio", Literal["token", "sequence"]),
            ("anchor", Anchor),
        ):
            _require_one_of("GRPOSettings", name, getattr(self, name), get_args(choices))
        if self.ratio == "sequence" and self.anchor == "credit":
            raise ValueError(
                "GRPOSettings.anchor: 'credit' with ratio 'sequence', which gives every token of a rollout the mean of its advantages; "
                "the credit of single tokens would reach all, so take another anchor or ratio 'token'"
            )

    @property
    def sequence_anchor(self) -> float:
        """Weight of R_anchor in the sequence reward: 0 unless the anchor acts there."""
        return self.anchor_weight if self.anchor == "sequence" else 0.0
