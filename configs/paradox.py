"""The paper's paradox in miniature: one cold start with a strong tool prior, and the four columns of the paper's ablation from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from configs.exploration_anchoring import without_gating
from configs.nframes_gating import without_anchoring
from configs.paravt_tiny import paravt_tiny
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.world.text import TextSettings
from rollout.evaluation.play import EvaluationSettings
from train.settings import Run, change


def paradox_tiny() -> Run:
    """PARA-GRPO from a cold start whose format is badly spoilt, where only right answers and the anchor are paid.

    Command: python -m train.run --config=paradox_tiny
    Multiple choice alone, because grounding needs crops at any K; no reward for calls and none for format but the anchor
    (docs/paradox.md says what happens with them).
    Measured: f 1.00, kappa 1.07 in training, accuracy 0.92 over K; three seeds.
    """
    run = paravt_tiny()
    assert run.rl is not None
    text = TextSettings(multiple_choice=1.0, leak=0.6, unclosed=0.7, untagged=0.25)
    evaluation = EvaluationSettings(
        questions=64, samples=2, frames=(4, 16, 64), dispatch=("parallel",), temperatures=(0.7,)
    )
    rewards = RewardSettings(format_weight=0.0, tool_weight=0.0, format_cap=False)
    run = dataclasses.replace(run, text=text, evaluation=evaluation)
    return change(run, "paradox_tiny", steps=30, rewards=rewards)


def _vanilla(run: Run, name: str) -> Run:
    return without_gating(without_anchoring(run, ""), name)


def _full(run: Run, name: str) -> Run:
    return dataclasses.replace(run, name=name)


ARMS: dict[str, Callable[[Run, str], Run]] = {
    "GRPO": _vanilla,
    "+ exploration anchoring": without_gating,
    "+ nFrames gating": without_anchoring,
    "PARA-GRPO": _full,
}
