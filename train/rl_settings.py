"""The settings of PARA-GRPO, checked against each other before any work is done. REFERENCE 3 has the published values."""

from __future__ import annotations

import dataclasses
import math

from models.qwen3_vl import remat
from models.qwen3_vl.remat import Remat
from paravt_jax.grpo import GRPOSettings, check_anchor
from paravt_jax.rewards import RewardSettings
from train.batch import BatchShape
from train.optimizer import OptimizerSettings, require_counts


@dataclasses.dataclass(frozen=True)
class RLSettings:
    """One run's reinforcement learning."""

    steps: int
    shape: BatchShape
    optimizer: OptimizerSettings = OptimizerSettings()
    grpo: GRPOSettings = GRPOSettings()
    rewards: RewardSettings = RewardSettings()
    frame_budgets: tuple[int, ...] = (4, 8, 16, 32, 64)
    """What the overview budget K is drawn from, once a prompt and step (nFrames gating); a single one means no gating."""
    temperature: float = 0.7
    subagents: BatchShape | None = None
    """Room for sub-agents' turns, one a group, where these are trained too, with what their episode earned; None: main agents alone."""
    microbatches: int = 1
    """Most parts in which an update is computed, each of whole groups (missing ones are padding); the loss is the same. There are fewer
    where parts of so few rows would be padded, every device computes at least one; more where only that gives each process whole groups."""
    max_staleness: int = 2
    """Updates that a rollout's weights may be behind those that learn from it."""
    save_every: int = 10
    remat: Remat = "none"
    """What the backward pass finds saved of each layer: everything, its input (full), that and what attention gave (attention), both and
    the matrix products (dots), or its input in the host's memory (offload)."""
    logprob_chunk: int | None = None

    def __post_init__(self):
        require_counts("rl", steps=self.steps, save_every=self.save_every, microbatches=self.microbatches)
        remat.check("rl.remat", self.remat)
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"rl.temperature: {self.temperature}; rollouts that are learned from are sampled, give a number above 0")
        if self.logprob_chunk is not None and self.logprob_chunk < 1:
            raise ValueError(f"rl.logprob_chunk: {self.logprob_chunk}; give a whole number of at least 1, or None for all at once")
        check_anchor(self.rewards, self.grpo)
        if self.shape.rows != self.grpo.group_size:
            raise ValueError(
                f"rl.shape.rows: {self.shape.rows}; a group has rl.grpo.group_size = {self.grpo.group_size} rollouts, make them equal"
            )
        if not self.frame_budgets or min(self.frame_budgets) < 1:
            raise ValueError(f"rl.frame_budgets: {self.frame_budgets}; name at least one number of frames, each 1 or more")
        if self.max_staleness < 0:
            raise ValueError(f"rl.max_staleness: {self.max_staleness}; give 0 or more updates")
        if self.subagents is not None and (self.subagents.rows != 1 or self.subagents.suffix > self.shape.suffix):
            raise ValueError(
                f"rl.subagents: rows {self.subagents.rows}, suffix {self.subagents.suffix}; every sub-agent is a group of 1 row, "
                f"not longer than a rollout's ({self.shape.suffix})"
            )
        for name, shape in (("shape", self.shape), ("subagents", self.subagents)):
            if shape is not None and shape.groups < self.microbatches:
                raise ValueError(f"rl.microbatches: {self.microbatches} parts of rl.{name}.groups = {shape.groups}; give at most so many")
