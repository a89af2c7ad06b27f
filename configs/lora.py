"""PARA-GRPO with adapters, for one to four small chips and the drawn scenes."""

from __future__ import annotations

from configs.paravt_8b import paravt_8b
from models.lora import LoRASettings
from train.learn.optimizer import OptimizerSettings
from train.settings import Run, change


def paravt_2b_lora() -> Run:
    """Qwen3-VL-2B with adapters: 20 steps of SFT and 100 of PARA-GRPO, on one v5e chip.

    Command: python -m train.run --config=paravt_2b_lora

    `python -m paravt_extras.scenes --out data/scenes` draws the data (docs/data.md). The
    demonstrations say what four frames show, so `data.frames` is 4. A step has 16 rows packed to
    4,096 tokens in SFT, and 4 prompts x 8 rollouts in PARA-GRPO; a demonstration has about 1,000
    tokens.

    Limits of lengths are shorter than in `paravt_8b`, which keeps small what a step may need: 2,048
    tokens behind a prompt, 1,024 per turn, 256 per report. A prompt of 64 frames has 5,120. The
    cache of the engine is chosen so that all 32 rollouts fit at these limits.

    The largest programs were compiled for v5e:1x1 and fit (docs/scale.md). A GPU of 24 GB fits by
    an estimate. A step of an earlier commit ran on an H200 (docs/training.md).

    Rank, learning rates and numbers of steps are our choice and not tuned. The learning rates are
    ten times those of training all weights.

    Not in the paper, and not measured on real weights.
    """
    fields = {
        "model.path": "Qwen/Qwen3-VL-2B-Instruct",
        "model.size": "2b",
        "lora": LoRASettings(rank=16),
        "data.annotations": "data/scenes/annotations",
        "data.media": "data/scenes/media",
        "data.folder": "data/scenes_prepared",
        "data.frames": 4,
        "protocol.turn_tokens": 1024,
        "protocol.summary_tokens": 256,
        "protocol.trajectory_tokens": 2048,
        "sft.steps": 20,
        "sft.row_tokens": 4096,
        "sft.optimizer.learning_rate": 2e-4,
        "rl.steps": 100,
        "rl.prompts": 4,
        "rl.optimizer": OptimizerSettings(learning_rate=2e-5),
    }
    return change(paravt_8b(), "paravt_2b_lora", fields)


def sft_2b_lora() -> Run:
    """The cold start of `paravt_2b_lora` alone.

    Command: python -m train.run --config=sft_2b_lora
    """
    return change(paravt_2b_lora(), "sft_2b_lora", {"evaluation.questions": 0, "rl": None})


def paravt_4b_lora() -> Run:
    """`paravt_2b_lora` with Qwen3-VL-4B, on one v6e chip.

    Command: python -m train.run --config=paravt_4b_lora

    The largest programs were compiled for v6e:1x1 and fit (docs/scale.md). Nothing has run.

    Not in the paper, and not measured on real weights.
    """
    fields = {"model.path": "Qwen/Qwen3-VL-4B-Instruct", "model.size": "4b"}
    return change(paravt_2b_lora(), "paravt_4b_lora", fields)


def paravt_8b_lora() -> Run:
    """`paravt_2b_lora` with Qwen3-VL-8B, on a v5e:2x2 slice.

    Command: python -m train.run --config=paravt_8b_lora

    The largest programs were compiled for v5e:2x2 and fit (docs/scale.md). Nothing has run.

    Not in the paper, and not measured on real weights.
    """
    fields = {"model.path": "Qwen/Qwen3-VL-8B-Instruct", "model.size": "8b"}
    return change(paravt_2b_lora(), "paravt_8b_lora", fields)
