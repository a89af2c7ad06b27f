"""Folders of Qwen2.5-VL in the Hugging Face layout: config.json, and the names of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from models.qwen2_5_vl.config import Qwen25VLConfig, Qwen25VLVisionConfig
from models.weights.hf_config import (
    ids_of,
    read_fields,
    read_text,
    require_supported,
    text_to_hf,
    whole_to_hf,
)
from models.weights.hf_layout import TensorLayout, linear_layouts, patch_layout, text_layouts

TITLE = "Qwen2.5-VL"
# Fields of config.json for which this model supports only one value.
_TEXT = {"hidden_act": "silu", "use_sliding_window": False}
_VISION = {"hidden_act": "silu"}
FIXED: Mapping[str, Any] = {"qk_norm": False, "attention_bias": True, "mrope_interleaved": False}
# Those of transformers.
_DEFAULTS = {"mrope_section": (16, 24, 24), "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5}
# Prefix of tensors -> of modules. Checkpoints keep the names of an earlier transformers.
MODULES = {"model.": "model.language_model.", "visual.": "model.visual."}


def from_hf(content: Mapping[str, Any]) -> Qwen25VLConfig:
    """Read the content of a config.json; see `models.weights.hf_config.from_hf`.

    The published files have the decoder's fields at their top level; transformers 5 writes them
    into `text_config`.
    """
    text = content.get("text_config") or content
    vision = content.get("vision_config", {})
    parts = {"text_config": text, "vision_config": vision}
    require_supported(parts, {"text_config": _TEXT, "vision_config": _VISION}, TITLE)
    # transformers takes it from either place.
    tied = content.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False)
    if "hidden_size" in text and "num_attention_heads" in text:
        text = {"head_dim": text["hidden_size"] // text["num_attention_heads"], **text}
    vision = {"tokens_per_second": 4, **vision, **(vision.get("rope_parameters") or {})}
    return Qwen25VLConfig(
        read_fields(Qwen25VLVisionConfig, "vision_config", vision, TITLE),
        read_text(text, TITLE, tied=tied, defaults=_DEFAULTS, fixed=FIXED),
        **ids_of(content),
    )


def to_hf(config: Qwen25VLConfig) -> dict[str, Any]:
    """Return the content of a `config.json`; see `models.weights.hf_config.to_hf`."""
    vision = dataclasses.asdict(config.vision)
    vision |= {
        "model_type": "qwen2_5_vl",
        "fullatt_block_indexes": list(config.vision.fullatt_block_indexes),
        "rope_parameters": {"rope_type": "axial", "rope_theta": vision.pop("rope_theta")},
    }
    text = text_to_hf(config.text, {})
    return whole_to_hf(
        config,
        "Qwen2_5_VLForConditionalGeneration",
        text | {"model_type": "qwen2_5_vl_text"} | _TEXT,
        vision | _VISION,
    )


def tensor_layouts(config: Qwen25VLConfig) -> dict[str, TensorLayout]:
    """Map the path of each parameter to its tensor."""
    block = "visual.blocks.{}"
    merger = "visual.merger"
    linears = {
        "vision/blocks/qkv": f"{block}.attn.qkv",
        "vision/blocks/out": f"{block}.attn.proj",
        "vision/blocks/gate": f"{block}.mlp.gate_proj",
        "vision/blocks/up": f"{block}.mlp.up_proj",
        "vision/blocks/down": f"{block}.mlp.down_proj",
        "vision/merger/fc1": f"{merger}.mlp.0",
        "vision/merger/fc2": f"{merger}.mlp.2",
    }
    return text_layouts(config.text, "model") | {
        "vision/patch/kernel": patch_layout(config.vision, "visual.patch_embed.proj.weight"),
        "vision/blocks/norm1/scale": TensorLayout(f"{block}.norm1.weight"),
        "vision/blocks/norm2/scale": TensorLayout(f"{block}.norm2.weight"),
        "vision/merger/norm/scale": TensorLayout(f"{merger}.ln_q.weight"),
        **linear_layouts(linears),
    }


def vision_modules(config: Qwen25VLConfig) -> dict[str, list[str]]:
    """Map each trained part of the tower to its modules in transformers."""
    return {"merger": ["model.visual.merger"], "tower": ["model.visual"]}
