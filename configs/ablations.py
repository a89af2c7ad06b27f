"""Ablations of the full recipe (`paravt_8b`, `paravt_tiny`), and the cross-model study.

The study asks what a model does whose tool prior is weaker, without a cold start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from configs.paravt_8b import paravt_8b
from configs.paravt_tiny import paravt_tiny
from train.settings import ModelSettings, Run, change

# Without nFrames gating: 64 frames for every prompt.
UNGATED = {"rl.frame_budgets": (64,)}
# Without exploration anchoring: no pinned `<think>`, no answer-suffix term, no anchor.
UNANCHORED = {
    "protocol.pin_think": False,
    "rl.grpo.anchor": "none",
    "rl.rewards.answer_suffix": False,
}


@dataclasses.dataclass(frozen=True)
class Ablation:
    """Changes to the full recipe."""

    title: str
    """The recipe in one sentence; {0} stands for the model or world that it trains on."""
    changes: Mapping[str, Any]
    """New values by dotted field name of `Run`."""
    tiny: str
    """What is known of it in the small world. Empty if it changes nothing there; then no recipe."""


ABLATIONS = {
    "vanilla_grpo": Ablation(
        "GRPO {0}, with 64 frames for every prompt and no anchor.",
        UNGATED | UNANCHORED,
        "Measured only with other rewards and demonstrations, those of docs/paradox.md.",
    ),
    "exploration_anchoring": Ablation(
        "The full recipe {0}, with 64 frames for every prompt.",
        UNGATED,
        "Measured on multiple choice alone: docs/paradox.md, the part about gating.",
    ),
    "nframes_gating": Ablation(
        "GRPO {0} with K drawn per prompt and no anchor.",
        UNANCHORED,
        "Measured only with other rewards and demonstrations, those of docs/paradox.md.",
    ),
    "no_tool_reward": Ablation(
        "The full recipe {0}, without a reward for calls.",
        {"rl.rewards.tool_weight": 0.0},
        "",  # the recipe of the small world pays no calls anyway
    ),
    "no_penalty": Ablation(
        "The full recipe {0}, without gamma, the penalty for a token that breaks an open block.",
        {"rl.rewards.gamma": 0.0},
        "Not measured with today's code.",
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


def _recipe(
    base: Callable[[], Run], name: str, changes: Mapping[str, Any], documentation: str
) -> Callable[[], Run]:
    def recipe() -> Run:
        return change(base(), name, changes)

    recipe.__name__ = recipe.__qualname__ = name
    recipe.__doc__ = documentation
    return recipe


def _recipes() -> list[Callable[[], Run]]:
    """Make the recipes of each ablation: with the 8B model and, mostly, in the small world."""
    command = "Command: python -m train.run --config="
    begin = "--sft.steps 0 --model.path "
    recipes = []
    for ablation, row in ABLATIONS.items():
        name, title = f"{ablation}_8b", row.title.format("on Qwen3-VL-8B")
        text = f"{title}\n\n{command}{name} {begin}runs/sft_8b/model\n"
        text += "The paper's figures are in docs/reference.md. Not measured here."
        recipes.append(_recipe(paravt_8b, name, row.changes, text))
        if row.tiny:
            name, title = f"{ablation}_tiny", row.title.format("in the small world")
            text = f"{title}\n\n{command}{name} {begin}runs/sft_tiny/model\n{row.tiny}"
            recipes.append(_recipe(paravt_tiny, name, row.changes, text))
    return recipes


RECIPES = {recipe.__name__: recipe for recipe in _recipes()}
