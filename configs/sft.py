"""The cold start alone."""

from __future__ import annotations

from configs.paravt_8b import paravt_8b
from configs.paravt_tiny import paravt_tiny
from train.settings import Run, change


def sft_8b() -> Run:
    """The cold start of Qwen3-VL-8B, without reinforcement learning.

    Command: python -m train.run --config=sft_8b

    No questions are held out, because `rollout.evaluate` plays the paper's splits.

    Paper: VideoMME 60.7, with subtitles 69.0, LVBench 39.1, MLVU 63.7; f 0.13, kappa 2.50. Not
    measured here.
    """
    return change(paravt_8b(), "sft_8b", {"evaluation.questions": 0, "rl": None})


def sft_tiny() -> Run:
    """The cold start of the small world, without reinforcement learning.

    Command: python -m train.run --config=sft_tiny
    """
    return change(paravt_tiny(), "sft_tiny", {"rl": None})
