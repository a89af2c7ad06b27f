"""The paper's paradox in miniature: a cold start with a strong tool prior, and PARA-GRPO from it.

`paravt_extras.studies.paradox` compares it with the other columns of the paper's ablation.
"""

from __future__ import annotations

from configs.paravt_tiny import paravt_tiny
from paravt_jax.method.rewards import RewardSettings
from paravt_jax.world.text import TextSettings
from train.settings import EvaluationSettings, Run, change


def paradox_tiny() -> Run:
    """PARA-GRPO from a cold start with bad format; rewards for right answers and the anchor only.

    Command: python -m train.run --config=paradox_tiny

    All questions are multiple choice, because grounding needs crops at any K. Calls earn no reward,
    and format earns only the anchor; docs/paradox.md says why.

    Measured: docs/paradox.md.
    """
    text = TextSettings(
        multiple_choice=1.0,
        # A strong prior: crops of both halves wherever the overview shows no answer.
        look=1.0,
        look_when_shown=0.5,
        both=1.0,
        one_by_one=0.15,
        toolless=0.0,
        ground_by_overview=True,
        leak=0.6,
        unclosed=0.7,
        untagged=0.25,
    )
    evaluation = EvaluationSettings(
        questions=64,
        frames=(4, 16, 64),
        dispatch=("parallel",),
        temperatures=(0.7, 0.0, 0.3, 1.0),
    )
    rewards = RewardSettings(format_weight=0.0, tool_weight=0.0, format_cap=False)
    changes = {
        "text": text,
        "sft.steps": 400,
        "sft.rows": 11,
        "sft.row_tokens": 544,
        "sft.optimizer.learning_rate": 3e-3,
        "evaluation": evaluation,
        "rl.steps": 30,
        "rl.save_every": 10,
        "rl.optimizer.learning_rate": 3e-4,
        "rl.grpo.kl_coefficient": 0.01,
        "rl.grpo.min_signal": 0.0,
        "rl.rewards": rewards,
    }
    return change(paravt_tiny(), "paradox_tiny", changes)
