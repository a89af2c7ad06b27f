"""Qwen3-VL-30B-A3B as a `models.family.Family`: the tower of Qwen3-VL, a decoder with experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from models.config import ExpertsConfig, TextConfig, require
from models.qwen3_vl import folder, sizes
from models.qwen3_vl.config import Qwen3VLConfig
from models.qwen3_vl.family import FAMILY as DENSE
from models.weights.hf_config import read_fields, require_supported
from models.weights.hf_layout import TensorLayout

TITLE = "Qwen3-VL with experts"
# Fields of config.json for which this model supports only one value.
_FIXED = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


@dataclasses.dataclass(frozen=True)
class Qwen3VLMoeConfig(Qwen3VLConfig):
    """A Qwen3-VL whose decoder layers have experts."""

    family = "qwen3_vl_moe"

    def __post_init__(self):
        super().__post_init__()
        require(self.text.experts is not None, "text.experts = None: every layer has experts")


def _with_experts(dense: Qwen3VLConfig, experts: ExpertsConfig, **text: Any) -> Qwen3VLMoeConfig:
    fields = {field.name: getattr(dense, field.name) for field in dataclasses.fields(dense)}
    fields["text"] = dataclasses.replace(dense.text, experts=experts, **text)
    return Qwen3VLMoeConfig(**fields)


def from_hf(content: Mapping[str, Any]) -> Qwen3VLMoeConfig:
    """Read the content of a config.json; see `models.weights.hf_config.from_hf`."""
    text = {"mlp_only_layers": [], **content.get("text_config", {})}
    # transformers calls it so in its own objects.
    if "num_local_experts" in text:
        text = {"num_experts": text["num_local_experts"], **text}
    require_supported({"text_config": text}, {"text_config": _FIXED}, TITLE)
    experts = read_fields(ExpertsConfig, "text_config", text, TITLE)
    return _with_experts(folder.from_hf(content), experts)


def to_hf(config: Qwen3VLMoeConfig) -> dict[str, Any]:
    """Return the content of a `config.json`; see `models.weights.hf_config.to_hf`."""
    assert config.text.experts is not None
    content = folder.to_hf(config)
    more = {"model_type": "qwen3_vl_moe_text", **_FIXED}
    content["text_config"] |= dataclasses.asdict(config.text.experts) | more
    content["vision_config"]["model_type"] = "qwen3_vl_moe"
    return content | {"architectures": ["Qwen3VLMoeForConditionalGeneration"]}


def tensor_layouts(config: Qwen3VLMoeConfig) -> dict[str, TensorLayout]:
    """Map the path of each parameter to its tensor. Published experts have the layout of this
    project."""
    table = folder.tensor_layouts(config)
    mlp = "model.language_model.layers.{}.mlp"
    for name in ("gate", "up", "down"):
        del table[f"text/layers/{name}"]
    return table | {
        "text/layers/experts/router": TensorLayout(f"{mlp}.gate.weight", inputs=1),
        "text/layers/experts/gate_up": TensorLayout(f"{mlp}.experts.gate_up_proj"),
        "text/layers/experts/down": TensorLayout(f"{mlp}.experts.down_proj"),
    }


def _published() -> Qwen3VLMoeConfig:
    """Return Qwen3-VL-30B-A3B: 128 experts, of which a token uses 8."""
    large = sizes.qwen3_vl("8b")
    text = TextConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        mrope_section=(24, 20, 20),
        rope_theta=5_000_000.0,
        tie_word_embeddings=False,
        experts=ExpertsConfig(128, 8, 768),
    )
    vision = dataclasses.replace(large.vision, out_hidden_size=2048)
    return Qwen3VLMoeConfig(vision, text)


# transformers transposes the matrices of experts that it reads, but leaves square ones as they are.
# So no small size has a square one.
def tiny(vocab_size: int) -> Qwen3VLMoeConfig:
    """Return the laptop model, with four experts, of which a token uses two."""
    return _with_experts(sizes.tiny(vocab_size), ExpertsConfig(4, 2, 96))


def _rehearsal() -> Qwen3VLMoeConfig:
    return _with_experts(sizes.SIZES["rehearsal"](), ExpertsConfig(8, 2, 128))


FAMILY = dataclasses.replace(
    DENSE,
    title=TITLE,
    sizes={"30b-a3b": _published, "rehearsal": _rehearsal},
    tiny=tiny,
    from_hf=from_hf,
    to_hf=to_hf,
    tensor_layouts=tensor_layouts,
)
