"""Settings of PARA-GRPO. docs/reference.md, 3, has the published values."""

from __future__ import annotations

import dataclasses

from models.layers import Remat
from paravt_jax.checks import require_above, require_at_least, require_choices
from paravt_jax.method.grpo.settings import GRPOSettings
from paravt_jax.method.rewards import RewardSettings
from train.learn.optimizer import OptimizerSettings


@dataclasses.dataclass(frozen=True)
class RLSettings:
    """Settings of reinforcement learning."""

    steps: int
    """Number of steps. Each learns from fresh rollouts."""
    prompts: int = 7
    """Prompts per step; each gets `grpo.group_size` rollouts."""
    updates_per_batch: int = 1
    """Updates per step, each from all rollouts (mu of GRPO). Clips act from the second on."""
    optimizer: OptimizerSettings = OptimizerSettings()
    grpo: GRPOSettings = GRPOSettings()
    rewards: RewardSettings = RewardSettings()
    frame_budgets: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Numbers of overview frames K; one is drawn per prompt (nFrames gating)."""
    temperature: float = 0.7
    """Sampling temperature of rollouts."""
    max_staleness: int = 0
    """Updates that a rollout may outlive: 0, 1 (trained in the step after) or 2 (at the latest)."""
    microbatch_tokens: int = 16_384
    """Most tokens of a micro-batch, 0: by device; a row always has room for the longest rollout."""
    save_every: int = 10
    """Steps between checkpoints."""
    remat: Remat = "none"
    """Activation checkpointing: what is kept of each layer for the backward pass."""

    def __post_init__(self):
        require_at_least("rl", self, 1, "steps", "prompts", "updates_per_batch", "save_every")
        require_at_least("rl", self, 0, "microbatch_tokens")
        # At temperature 0 there are no different rollouts to learn from.
        require_above("rl", self, 0, "temperature")
        require_choices("rl", self)
        if self.max_staleness not in (0, 1, 2):
            raise ValueError(
                f"rl.max_staleness: {self.max_staleness}; give 0 (every step waits for all of its "
                "rollouts), 1 or 2 updates"
            )
        if not self.frame_budgets or min(self.frame_budgets) < 1:
            raise ValueError(
                f"rl.frame_budgets: {self.frame_budgets}; give at least one number of frames, "
                "each 1 or more"
            )
        # In the first update of a batch, the ratio is 1.
        for name in ("clip", "upper_clip", "dual_clip"):
            value, unchanged = getattr(self.grpo, name), getattr(GRPOSettings(), name)
            if self.updates_per_batch == 1 and value != unchanged:
                raise ValueError(
                    f"rl.grpo.{name}: {value} with rl.updates_per_batch 1; the policy ratio is 1 "
                    "in a batch's first update, so no clip acts: raise rl.updates_per_batch, or "
                    f"leave {name} at {unchanged}"
                )
        if self.grpo.sequence_anchor and not self.rewards.format_weight:
            raise ValueError(
                "rl.grpo.anchor: 'sequence' with rl.rewards.format_weight 0; R_anchor is part of "
                "the format reward, so it would have no effect: raise the weight, or choose "
                "another anchor"
            )
