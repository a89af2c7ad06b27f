"""Ablations of the full recipe (`paravt_8b`), and the cross-model study.

The study asks what a model does whose tool prior is weaker, without a cold start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from configs.paravt_8b import paravt_8b
from train.settings import ModelSettings, Run, change

# Without nFrames gating: 64 frames for every prompt.
UNGATED = {"rl.frame_budgets": (64,)}
# Without exploration anchoring: no pinned `<think>`, no answer-suffix term, no anchor.
UNANCHORED = {
    "protocol.pin_think": False,
    "rl.grpo.anchor": "none",
    "rl.rewards.answer_suffix": False,
}


# The recipe in one sentence, and what it changes.
ABLATIONS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "vanilla_grpo_8b": (
        "GRPO on Qwen3-VL-8B, with 64 frames for every prompt and no anchor.",
        UNGATED | UNANCHORED,
    ),
    "exploration_anchoring_8b": (
        "The full recipe on Qwen3-VL-8B, with 64 frames for every prompt.",
        UNGATED,
    ),
    "nframes_gating_8b": (
        "GRPO on Qwen3-VL-8B with K drawn per prompt and no anchor.",
        UNANCHORED,
    ),
    "no_tool_reward_8b": (
        "The full recipe on Qwen3-VL-8B, without a reward for calls.",
        {"rl.rewards.tool_weight": 0.0},
    ),
    "no_penalty_8b": (
        "The full recipe on Qwen3-VL-8B, without gamma, the penalty for a token that breaks an "
        "open block.",
        {"rl.rewards.gamma": 0.0},
    ),
}


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


def _recipe(name: str, title: str, changes: Mapping[str, Any]) -> Callable[[], Run]:
    def recipe() -> Run:
        return change(paravt_8b(), name, changes)

    recipe.__name__ = recipe.__qualname__ = name
    recipe.__doc__ = (
        f"{title}\n\nCommand: python -m train.run --config={name} --sft.steps 0 "
        "--model.path runs/sft_8b/model\nThe paper's figures are in docs/reference.md. Not "
        "measured here."
    )
    return recipe


RECIPES = {name: _recipe(name, *ablation) for name, ablation in ABLATIONS.items()}
