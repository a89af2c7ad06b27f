"""Hyperparameters and variants of PARA-GRPO. The defaults are the published recipe."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from paravt_jax.checks import require_above, require_at_least, require_choices, require_share

Anchor = Literal["likelihood", "credit", "sequence", "none"]
Level = Literal["group", "batch", "none"]
KLKind = Literal["k1", "k2", "k3"]
Ratio = Literal["token", "sequence"]
NormalisationName = Literal["group", "group-mean", "leave-one-out", "group-batch", "batch", "none"]


class Normalisation(NamedTuple):
    """How values are normalised: (x - mean) / (std + epsilon). `none` omits the mean or the std."""

    mean: Level
    """Values that share a mean."""
    std: Level
    """Values that share a standard deviation."""
    leave_one_out: bool = False
    """Compare each value with the mean of the others."""


NORMALISATIONS: Mapping[str, Normalisation] = MappingProxyType(
    {
        "group": Normalisation("group", "group"),
        "group-mean": Normalisation("group", "none"),
        "leave-one-out": Normalisation("group", "none", leave_one_out=True),
        "group-batch": Normalisation("group", "batch"),
        "batch": Normalisation("batch", "batch"),
        "none": Normalisation("none", "none"),
    }
)
"""The normalisations that a recipe can name. `group-mean` is Dr. GRPO's, `leave-one-out` RLOO's;
`group-batch` subtracts each group's mean and divides by the standard deviation of the batch."""


@dataclasses.dataclass(frozen=True)
class GRPOSettings:
    """Settings of advantages and loss.

    The anchor is where the format reward acts:
        likelihood: the log-likelihood of struct(o) is a term of the objective (the paper's
            formula), with a penalty of gamma per violation.
        credit: R_anchor is added to the advantages of struct(o) only.
        sequence: R_anchor is part of the sequence reward (the release).
        none: nowhere.
    """

    group_size: int = 8
    """Rollouts per prompt."""
    reward_bias: float = 0.2
    """Subtracted from a reward before it is scaled."""
    reward_scaling: float = 10.0
    """Factor on a reward before it is clipped and normalised."""
    # The bound 20 is reached at R = 2.2, although rewards go up to 2.8.
    reward_clip: float | None = 20.0
    """Bound on scaled rewards in both directions, None for no bound."""
    reward_normalisation: NormalisationName = "group"
    """Normalisation of scaled rewards. Dr. GRPO uses `group-mean`, RLOO `leave-one-out`."""
    kl_coefficient: float = 0.01
    """Weight of the KL to the reference policy, subtracted from the reward of each token."""
    kl_kind: KLKind = "k1"
    """Estimator of that KL from one sample: d, d^2 / 2, or exp(-d) - 1 + d."""
    advantage_normalisation: NormalisationName = "batch"
    """Normalisation of token advantages, over all generated tokens of the batch by default."""
    # Dividing by the batch's std gives every update full size, even if one group alone decides it.
    min_signal: float = 0.0
    """Scale advantages down if less than this share of groups has unequal rewards; 0: never."""
    ratio: Ratio = "token"
    """Policy ratio: of each token, or the geometric mean over a rollout's tokens (GSPO)."""
    # Ratios differ from 1 in the later updates of a batch only (`RLSettings.updates_per_batch`).
    clip: float = 0.2
    """The policy ratio is clipped below at 1 - clip."""
    upper_clip: float | None = None
    """The policy ratio is clipped above at 1 + upper_clip (clip-higher); None: at 1 + clip."""
    dual_clip: float | None = None
    """Bound on the policy ratio of tokens with a negative advantage; None for no bound."""
    # The importance weight is exp(proximal - behaviour log-prob).
    behaviour_cap: float | None = 5.0
    """Tokens with a larger importance weight are left out of the loss. None for no bound."""
    anchor: Anchor = "sequence"
    """Where R_anchor acts: objective, advantages of struct(o), sequence reward, or nowhere."""
    anchor_weight: float = 0.5
    """Weight of the anchor in the objective, the advantages or the reward."""

    def __post_init__(self):
        if self.group_size < 2:
            raise ValueError(
                f"rl.grpo.group_size: {self.group_size} is too small to compare rollouts; "
                "give at least 2"
            )
        section = "rl.grpo"
        positive = ("reward_scaling", "reward_clip", "behaviour_cap", "upper_clip")
        require_above(section, self, 0, *positive)
        require_above(section, self, 1, "dual_clip")
        require_at_least(section, self, 0, "kl_coefficient", "anchor_weight")
        require_share(section, self, "min_signal")
        require_choices(section, self)
        if not 0 < self.clip < 1:
            raise ValueError(f"rl.grpo.clip: {self.clip}; give a number between 0 and 1")
        if not math.isfinite(self.reward_bias):
            raise ValueError(
                f"rl.grpo.reward_bias: {self.reward_bias}; give a finite number, such as 0.2"
            )
        if self.ratio == "sequence" and self.anchor == "credit":
            raise ValueError(
                "rl.grpo.anchor: 'credit' with ratio 'sequence', which would average the "
                "credit of single tokens over the whole rollout; "
                "choose another anchor, or ratio 'token'"
            )

    @property
    def clip_above(self) -> float:
        """The policy ratio is clipped above at 1 plus this."""
        return self.clip if self.upper_clip is None else self.upper_clip

    @property
    def sequence_anchor(self) -> float:
        """Weight of R_anchor in the sequence reward; 0 for all other anchors."""
        return self.anchor_weight if self.anchor == "sequence" else 0.0
