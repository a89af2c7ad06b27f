"""PARA-GRPO on Qwen3-VL-8B. Values are those of REFERENCE 3, except where noted below."""

from __future__ import annotations

from paravt_jax.method.grpo import GRPOSettings
from paravt_jax.method.rewards import RewardSettings
from rollout.engine.settings import EngineSettings
from rollout.evaluation.play import EvaluationSettings
from train.learn.optimizer import OptimizerSettings
from train.learn.rl_settings import RLSettings
from train.published_data import DataSettings
from train.settings import MeshSettings, ModelSettings, Run

# This KV cache holds 14 of a host's 32 rollouts at their longest; most are shorter
# (docs/plan-paravt_8b.json).
ENGINE = EngineSettings(page=64, cache_tokens=143_360, read_tokens=131_072, steps=32)


def paravt_8b() -> Run:
    """PARA-GRPO on Qwen3-VL-8B from the weights of the cold start; 7 prompts x 8 rollouts per step.

    Command: python -m train.run --config=paravt_8b --model.path runs/sft_8b/model

    Four settings differ from the release; docs/method.md says why. The ablations share them.
    - `grpo.anchor`: the paper's formula, with gamma at violations.
    - `rewards.format_cap`: R_fmt is not capped.
    - `grpo.reward_clip`: scaled rewards are not clipped.
    - `grpo.min_signal`: advantages shrink if less than a quarter of the groups have unequal
      rewards.
    The first moment is bfloat16, so that training fits on a v5e:4x4 slice (docs/scale.md).

    Paper: VideoMME 62.1, with subtitles 69.4, LVBench 39.8, MLVU 65.0; f 0.41, kappa 0.21. Not
    measured here.
    """
    return Run(
        name="paravt_8b",
        model=ModelSettings(path="Qwen/Qwen3-VL-8B-Instruct", size="8b", dtype="bfloat16"),
        data=DataSettings(),
        mesh=MeshSettings(fsdp=16),
        engine=ENGINE,
        # Before and after RL, on held-out questions. `rollout.evaluate` plays the paper's splits.
        evaluation=EvaluationSettings(
            samples=1, frames=(16, 64), dispatch=("parallel",), temperatures=(0.7,)
        ),
        rl=RLSettings(
            steps=54,
            optimizer=OptimizerSettings(moment_dtype="bfloat16"),
            grpo=GRPOSettings(anchor="likelihood", reward_clip=None, min_signal=0.25),
            rewards=RewardSettings(format_cap=False),
            remat="full",
            microbatches=4,
            logprob_chunk=512,
        ),
    )
