"""The cross-model study: Qwen2.5-VL-7B, whose tool prior is weaker, without a cold start."""

from __future__ import annotations

from configs.ablations import UNANCHORED, UNGATED
from configs.paravt_8b import paravt_8b
from train.settings import ModelSettings, Run, change


def paravt_7b() -> Run:
    """520 steps of PARA-GRPO on Qwen2.5-VL-7B, from its published weights.

    Command: python -m train.run --config=paravt_7b

    The paper reports that this model keeps its format (f 0.85) and never calls a tool in 520
    steps. It does not say whether there was a cold start. Here there is none: it would
    teach the calls that the study is about. Everything else is `paravt_8b`. Not measured here.
    """
    changes = {
        "model": ModelSettings(
            path="Qwen/Qwen2.5-VL-7B-Instruct", family="qwen2_5_vl", size="7b", dtype="bfloat16"
        ),
        "sft": None,
        "rl.steps": 520,
    }
    return change(paravt_8b(), "paravt_7b", changes)


def vanilla_grpo_7b() -> Run:
    """520 steps of GRPO on Qwen2.5-VL-7B, with 64 frames for every prompt and no anchor.

    Command: python -m train.run --config=vanilla_grpo_7b

    See `paravt_7b`.
    """
    return change(paravt_7b(), "vanilla_grpo_7b", UNGATED | UNANCHORED)
