"""The cold start by itself (REFERENCE 1)."""

from __future__ import annotations

import dataclasses

from configs.paravt_8b import ENGINE
from configs.paravt_tiny import paravt_tiny
from train.learn.optimizer import OptimizerSettings
from train.learn.sft import SFTSettings
from train.published_data import DataSettings
from train.settings import MeshSettings, ModelSettings, Run


def sft_8b() -> Run:
    """SFT on Qwen3-VL-8B, 500 steps of 16 rows packed to 8,192 tokens, learning rate 2e-5, cosine with 5 % warm-up.

    The rows of a step are a choice: the paper does not say how many. Nothing is held out: `rollout.evaluate` plays the paper's splits.

    Command: python -m train.run --config=sft_8b
    Paper: VideoMME 60.7, with subtitles 69.0, LVBench 39.1, MLVU 63.7; f 0.13, kappa 2.50. Not measured here.
    """
    return Run(
        name="sft_8b",
        model=ModelSettings(path="Qwen/Qwen3-VL-8B-Instruct", size="8b", dtype="bfloat16"),
        data=DataSettings(heldout=0),
        mesh=MeshSettings(fsdp=16),
        engine=ENGINE,
        sft=SFTSettings(
            steps=500,
            rows=16,
            optimizer=OptimizerSettings(learning_rate=2e-5, schedule="cosine", warmup=0.05),
            remat="full",
            logprob_chunk=512,
        ),
    )


def sft_tiny() -> Run:
    """The cold start of the small world, without reinforcement learning.

    Command: python -m train.run --config=sft_tiny
    """
    return dataclasses.replace(paravt_tiny(), name="sft_tiny", rl=None)
