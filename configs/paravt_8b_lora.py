"""PARA-GRPO with adapters on Qwen3-VL-8B, for four small chips and the drawn scenes."""

from __future__ import annotations

from configs.paravt_2b_lora import paravt_2b_lora
from train.settings import Run, change


def paravt_8b_lora() -> Run:
    """`paravt_2b_lora` with Qwen3-VL-8B, on a v5e:2x2 slice.

    Command: python -m train.run --config=paravt_8b_lora

    The largest programs were compiled for v5e:2x2 and fit (docs/scale.md). Nothing has run.

    Not in the paper, and not measured on real weights.
    """
    fields = {
        "model.path": "Qwen/Qwen3-VL-8B-Instruct",
        "model.size": "8b",
    }
    return change(paravt_2b_lora(), "paravt_8b_lora", fields)


def sft_8b_lora() -> Run:
    """The cold start of `paravt_8b_lora` alone.

    Command: python -m train.run --config=sft_8b_lora
    """
    return change(paravt_8b_lora(), "sft_8b_lora", {"data.heldout": 0, "rl": None})
