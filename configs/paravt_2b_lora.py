"""PARA-GRPO with adapters on Qwen3-VL-2B, for one chip and the drawn scenes."""

from __future__ import annotations

from configs.paravt_8b import paravt_8b
from models.lora import LoRASettings
from train.learn.optimizer import OptimizerSettings
from train.settings import Run, change


def paravt_2b_lora() -> Run:
    """Qwen3-VL-2B with adapters: 20 steps of SFT and 100 of PARA-GRPO, on one v5e chip.

    Command: python -m train.run --config=paravt_2b_lora

    `python -m paravt_jax.world.scenes --out data/scenes` draws the data (docs/data.md). The
    demonstrations say what four frames show, so `data.frames` is 4. A step has 16 rows packed to
    4,096 tokens in SFT, and 4 prompts x 8 rollouts in PARA-GRPO; a demonstration has at most 1,323
    tokens.

    Rank, learning rates and numbers of steps are our choice and not tuned. The learning rates are
    ten times those of training all weights. The cache leaves room on a chip of 16 GB. On a GPU,
    decoding copies what it reads, so one of 24 GB gets fewer slots; no GPU has been tried.

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
        "engine.cache_tokens": 65_536,
        "engine.read_tokens": 0,
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
    return change(paravt_2b_lora(), "sft_2b_lora", {"data.heldout": 0, "rl": None})
