"""The settings of PARA-GRPO, checked before any work is done. REFERENCE 3 has the published values."""

from __future__ import annotations

import dataclasses
import math

from models.qwen3_vl import remat
from models.qwen3_vl.remat import Remat
from paravt_jax.method.grpo import GRPOSettings
from paravt_jax.method.rewards import RewardSettings
from rollout.engine.settings import Lengths
from train.learn.batch import BatchShape
from train.learn.optimizer import OptimizerSettings, require_counts


@dataclasses.dataclass(frozen=True)
class RLSettings:
    """One run's reinforcement learning."""

    steps: int
    """Updates; each learns from fresh rollouts."""
    prompts: int = 7
    """Prompts per step; each gets `grpo.group_size` rollouts."""
    optimizer: OptimizerSettings = OptimizerSettings()
    grpo: GRPOSettings = GRPOSettings()
    rewards: RewardSettings = RewardSettings()
    frame_budgets: tuple[int, ...] = (4, 8, 16, 32, 64)
    """What the overview budget K of each prompt is drawn from (nFrames gating); one alone: no gating."""
    temperature: float = 0.7
    """Sampling temperature of rollouts."""
    subagents_per_rollout: float = 0.0
    """Sub-agents' turns trained per rollout, on average, with what their episode earned; 0: none."""
    microbatches: int = 1
    """Upper bound on gradient-accumulation steps; fewer where they would only add padding."""
    save_every: int = 10
    """Steps between checkpoints."""
    remat: Remat = "none"
    """Activation checkpointing: what of each layer is kept for the backward pass (models.qwen3_vl.remat)."""
    logprob_chunk: int | None = None
    """Tokens whose logits over the vocabulary exist at a time; None: all of them."""

    def __post_init__(self):
        require_counts(
            "rl",
            steps=self.steps,
            prompts=self.prompts,
            save_every=self.save_every,
            microbatches=self.microbatches,
        )
        remat.check("rl.remat", self.remat)
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"rl.temperature: {self.temperature}; rollouts that are learned from are sampled, give a number above 0"
            )
        if self.logprob_chunk is not None and self.logprob_chunk < 1:
            raise ValueError(
                f"rl.logprob_chunk: {self.logprob_chunk}; give a whole number of at least 1, or None for all at once"
            )
        if not self.frame_budgets or min(self.frame_budgets) < 1:
            raise ValueError(
                f"rl.frame_budgets: {self.frame_budgets}; name at least one number of frames, each 1 or more"
            )
        if not 0 <= self.subagents_per_rollout < math.inf:
            raise ValueError(
                f"rl.subagents_per_rollout: {self.subagents_per_rollout}; give a finite number of at least 0"
            )
        if self.grpo.sequence_anchor and not self.rewards.format_weight:
            raise ValueError(
                "rl.grpo.anchor: 'sequence' with rl.rewards.format_weight 0; R_anchor is part of the format reward and "
                "would count for nothing: raise the weight, or take another anchor"
            )

    def shapes(self, longest: Lengths) -> tuple[BatchShape, ...]:
        """Shapes of a step's batch: main agents' and, where they are trained too, sub-agents', each of
        which is a group of its own. `longest`: lengths of the run's sequences.

        Of more sub-agents' turns than there are rows for, those to train are drawn at random.
        """
        main = BatchShape(
            self.prompts, self.grpo.group_size, longest.prompt, longest.visual, longest.response
        )
        rows = math.ceil(self.prompts * self.grpo.group_size * self.subagents_per_rollout)
        if not rows:
            return (main,)
        return main, BatchShape(rows, 1, longest.crop_prompt, longest.crop_visual, longest.report)
