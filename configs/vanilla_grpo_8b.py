"""The baseline of the paper's table: GRPO without anchor and without gating."""

from __future__ import annotations

import dataclasses

from configs.base import Run
from configs.paravt_8b import paravt_8b
from paravt_jax.grpo import GRPOSettings


def vanilla_grpo_8b() -> Run:
    """GRPO on Qwen3-VL-8B: every prompt with 64 frames, no anchor.

    Command: python -m train.run --config=vanilla_grpo_8b
    Paper: VideoMME 62.0, with subtitles 68.6, LVBench 39.3, MLVU 64.5; f 0.13, kappa 0.02. Not measured here.
    """
    run = paravt_8b()
    assert run.rl is not None
    rl = dataclasses.replace(run.rl, frame_budgets=(64,), grpo=GRPOSettings(anchor="none"))
    return dataclasses.replace(run, name="vanilla_grpo_8b", rl=rl)
