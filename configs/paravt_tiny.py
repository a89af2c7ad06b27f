"""The small run: all phases of the method, at a size that trains on two CPU cores."""

from __future__ import annotations

from models.features import FrameSettings
from paravt_jax.method.grpo.settings import GRPOSettings
from paravt_jax.method.protocol import ProtocolSettings
from paravt_jax.method.rewards import frugal_reward
from paravt_jax.world.text import TextSettings
from paravt_jax.world.videos import WorldSettings
from train.learn.align import AlignSettings
from train.learn.optimizer import OptimizerSettings
from train.learn.rl_settings import RLSettings
from train.learn.sft import SFTSettings
from train.settings import EvaluationSettings, Run, change


def paravt_tiny() -> Run:
    """The whole method on a laptop: rendered videos, alignment, cold start, PARA-GRPO, evaluation.

    Command: python -m train.run --config=paravt_tiny

    Takes about 13 minutes on 2 cores. Measured: docs/results.md.
    """
    return Run(
        name="paravt_tiny",
        world=WorldSettings(),
        text=TextSettings(),
        # The pixels of its frames: programs have room for the largest frame.
        frames=FrameSettings(batch=64, max_pixels=1024, admission="counted"),
        protocol=ProtocolSettings(
            max_tool_turns=2,
            turn_tokens=64,
            summary_tokens=16,
            trajectory_tokens=144,
            text_tokens=48,
            # A window of 16 seconds (half a scene) has 8 frames.
            crop_frames=8,
        ),
        align=AlignSettings(steps=300),
        sft=SFTSettings(
            steps=750,
            # Few long rows: attention computes a tile for all rows if one of them needs it.
            rows=2,
            row_tokens=1360,
            optimizer=OptimizerSettings("muon", learning_rate=6e-3, weight_decay=0.0),
            warmup=0.02,
        ),
        evaluation=EvaluationSettings(
            questions=128,
            dispatch=("parallel", "none"),
        ),
        rl=RLSettings(
            steps=48,
            prompts=8,
            # The curve is evaluated as often.
            save_every=24,
            # A group at its longest. On a CPU longer rows gain nothing.
            microbatch_tokens=1664,
            optimizer=OptimizerSettings(learning_rate=2e-4, weight_decay=0.0),
            grpo=GRPOSettings(
                anchor="likelihood", reward_clip=None, kl_coefficient=0.05, min_signal=0.25
            ),
            rewards=frugal_reward(),
        ),
    )


def sft_tiny() -> Run:
    """The cold start of the small world, without reinforcement learning.

    Command: python -m train.run --config=sft_tiny
    """
    return change(paravt_tiny(), "sft_tiny", {"rl": None})
