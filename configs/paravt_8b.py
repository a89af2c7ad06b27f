"""PARA-GRPO on Qwen3-VL-8B, with the published values except where noted below."""

from __future__ import annotations

from paravt_jax.method.grpo.settings import GRPOSettings
from paravt_jax.method.rewards import RewardSettings
from rollout.engine.settings import EngineSettings
from train.learn.optimizer import OptimizerSettings
from train.learn.rl_settings import RLSettings
from train.learn.sft import SFTSettings
from train.settings import (
    DataSettings,
    EvaluationSettings,
    MeshSettings,
    ModelSettings,
    Run,
    change,
)


def paravt_8b() -> Run:
    """ParaVT on Qwen3-VL-8B: published data, 500 steps of SFT, then 54 steps of PARA-GRPO.

    Command: python -m train.run --config=paravt_8b

    --sft.steps 0 --model.path mwxely/ParaVT-8B-SFT begins with the published weights of the cold
    start. SFT has 16 rows packed to 8,192 tokens per step; the number of rows is our choice, as the
    paper does not give one. PARA-GRPO has 7 prompts x 8 rollouts per step.

    The mesh, gradient accumulation, rematerialisation and the engine's cache are chosen for the
    devices (docs/scale.md).

    Four settings differ from the release; docs/method.md says why. The ablations share them.
    - `grpo.anchor`: the paper's formula, with gamma at violations.
    - `rewards.format_cap`: R_fmt is not capped.
    - `grpo.reward_clip`: scaled rewards are not clipped.
    - `grpo.min_signal`: advantages shrink if less than a quarter of the groups have unequal
      rewards.
    `max_staleness` stays 0, other than in the release: the tiny run that supports these choices
    was measured on-policy.
    In RL, first moments have the type of the activations, so that training fits on a v5e:4x4 slice
    (docs/scale.md).

    Paper: VideoMME 62.1, with subtitles 69.4, LVBench 39.8, MLVU 65.0; f 0.41, kappa 0.21. Not
    measured here.
    """
    return Run(
        name="paravt_8b",
        model=ModelSettings(path="Qwen/Qwen3-VL-8B-Instruct", size="8b", dtype="bfloat16"),
        data=DataSettings(),
        mesh=MeshSettings(fsdp=0, tensor=0),
        engine=EngineSettings(slots=0, cache_tokens=0),
        sft=SFTSettings(
            steps=500,
            rows=16,
            optimizer=OptimizerSettings(learning_rate=2e-5),
            warmup=0.05,
            remat="auto",
            microbatches=0,
        ),
        # Before and after RL, on held-out questions. `rollout.evaluate` plays the paper's splits.
        evaluation=EvaluationSettings(frames=(16, 64), dispatch=("parallel",), temperatures=(0.7,)),
        rl=RLSettings(
            steps=54,
            optimizer=OptimizerSettings(),
            grpo=GRPOSettings(anchor="likelihood", reward_clip=None, min_signal=0.25),
            rewards=RewardSettings(format_cap=False),
            remat="auto",
            microbatch_tokens=0,
        ),
    )


def sft_8b() -> Run:
    """The cold start of Qwen3-VL-8B, without reinforcement learning.

    Command: python -m train.run --config=sft_8b

    No questions are held out, because `rollout.evaluate` plays the paper's splits.

    Paper: VideoMME 60.7, with subtitles 69.0, LVBench 39.1, MLVU 63.7; f 0.13, kappa 2.50. Not
    measured here.
    """
    return change(paravt_8b(), "sft_8b", {"evaluation.questions": 0, "rl": None})
