"""Qwen3-VL-30B-A3B as a `models.family.Family`: the tower of Qwen3-VL, a decoder with experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from models.config import ExpertsConfig, require
from models.qwen3_vl import sizes
from models.qwen3_vl.config import Qwen3VLConfig
from models.qwen3_vl.family import FAMILY as DENSE


@dataclasses.dataclass(frozen=True)
class Qwen3VLMoeConfig(Qwen3VLConfig):
    """A Qwen3-VL whose decoder layers have experts."""

    family = "qwen3_vl_moe"

    def __post_init__(self):
        super().__post_init__()
        require(self.text.experts is not None, "text.experts = None: every layer has experts")


def _with_experts(dense: Qwen3VLConfig, experts: ExpertsConfig, **text: Any) -> Qwen3VLMoeConfig:
    """Return a dense model with experts and other sizes of the decoder."""
    decoder = dataclasses.replace(dense.text, experts=experts, **text)
    vision = dataclasses.replace(dense.vision, out_hidden_size=decoder.hidden_size)
    return Qwen3VLMoeConfig(vision, decoder)


# transformers transposes the matrices of experts that it reads, but leaves square ones as they are.
# So no small size has a square one.
def tiny(vocab_size: int) -> Qwen3VLMoeConfig:
    """Return the laptop model, with four experts, of which a token uses two."""
    return _with_experts(sizes.tiny(vocab_size), ExpertsConfig(4, 2, 96))


SIZES = {
    # 128 experts, of which a token uses 8.
    "30b-a3b": _with_experts(
        sizes.SIZES["8b"],
        ExpertsConfig(128, 8, 768),
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_key_value_heads=4,
    ),
    "rehearsal": _with_experts(sizes.SIZES["rehearsal"], ExpertsConfig(8, 2, 128)),
}
_FIXED = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
FAMILY = dataclasses.replace(
    DENSE,
    title="Qwen3-VL with experts",
    config=Qwen3VLMoeConfig,
    architecture="Qwen3VLMoeForConditionalGeneration",
    supported={**DENSE.supported, "text_config": {**DENSE.supported["text_config"], **_FIXED}},
    experts=True,
    sizes=SIZES,
    tiny=tiny,
)
