"""The cold start alone (REFERENCE 1)."""

from __future__ import annotations

from configs.paravt_8b import ENGINE
from configs.paravt_tiny import paravt_tiny
from train.learn.optimizer import OptimizerSettings
from train.learn.sft import SFTSettings
from train.published_data import DataSettings
from train.settings import MeshSettings, ModelSettings, Run, change


def sft_8b() -> Run:
    """SFT on Qwen3-VL-8B: 500 steps of 16 rows packed to 8,192 tokens.

    Command: python -m train.run --config=sft_8b

    The number of rows is our choice; the paper does not give one. No questions are held out,
    because `rollout.evaluate` plays the paper's splits.

    Paper: VideoMME 60.7, with subtitles 69.0, LVBench 39.1, MLVU 63.7; f 0.13, kappa 2.50. Not
    measured here.
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
    return change(paravt_tiny(), "sft_tiny", {"evaluation.curve": False, "rl": None})
