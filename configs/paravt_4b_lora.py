"""PARA-GRPO with adapters on Qwen3-VL-4B, for one chip and the drawn scenes."""

from __future__ import annotations

from configs.paravt_2b_lora import paravt_2b_lora
from train.settings import Run, change


def paravt_4b_lora() -> Run:
    """`paravt_2b_lora` with Qwen3-VL-4B, on one v6e chip.

    Command: python -m train.run --config=paravt_4b_lora

    The largest programs were compiled for v6e:1x1 and fit (docs/scale.md). Nothing has run.

    Not in the paper, and not measured on real weights.
    """
    fields = {
        "model.path": "Qwen/Qwen3-VL-4B-Instruct",
        "model.size": "4b",
    }
    return change(paravt_2b_lora(), "paravt_4b_lora", fields)


def sft_4b_lora() -> Run:
    """The cold start of `paravt_4b_lora` alone.

    Command: python -m train.run --config=sft_4b_lora
    """
    return change(paravt_4b_lora(), "sft_4b_lora", {"data.heldout": 0, "rl": None})
