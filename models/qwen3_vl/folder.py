"""Folders of Qwen3-VL in the Hugging Face layout: config.json, and the names of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from models.qwen3_vl.config import Qwen3VLConfig, Qwen3VLVisionConfig
from models.weights.hf_config import (
    ids_of,
    read_fields,
    read_text,
    require_supported,
    text_to_hf,
    whole_to_hf,
)
from models.weights.hf_layout import TensorLayout, linear_layouts, patch_layout, text_layouts

TITLE = "Qwen3-VL"
# Fields of config.json for which this model supports only one value.
_SUPPORTED = {
    "text_config": {"hidden_act": "silu", "attention_bias": False},
    "vision_config": {"hidden_act": "gelu_pytorch_tanh"},
}
_FIXED = {"qk_norm": True, "attention_bias": False, "mrope_interleaved": True}
_DEFAULTS = {"mrope_section": (24, 20, 20), "rope_theta": 5_000_000.0}


def from_hf(content: Mapping[str, Any]) -> Qwen3VLConfig:
    """Read the content of a config.json; see `models.weights.hf_config.from_hf`."""
    require_supported(content, _SUPPORTED, TITLE)
    text = content.get("text_config", {})
    vision = content.get("vision_config", {})
    tied = content.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    vision = {**vision, **(vision.get("rope_parameters") or {})}
    return Qwen3VLConfig(
        read_fields(Qwen3VLVisionConfig, "vision_config", vision, TITLE),
        read_text(text, TITLE, tied=tied, defaults=_DEFAULTS, fixed=_FIXED),
        **ids_of(content),
    )


def to_hf(config: Qwen3VLConfig) -> dict[str, Any]:
    """Return the content of a `config.json`; see `models.weights.hf_config.to_hf`."""
    text = text_to_hf(config.text, {"mrope_interleaved": True})
    vision = dataclasses.asdict(config.vision)
    vision |= {
        "model_type": "qwen3_vl",
        "deepstack_visual_indexes": list(config.vision.deepstack_visual_indexes),
        "rope_parameters": {"rope_type": "axial", "rope_theta": vision.pop("rope_theta")},
    }
    return whole_to_hf(
        config,
        "Qwen3VLForConditionalGeneration",
        text | {"model_type": "qwen3_vl_text"} | _SUPPORTED["text_config"],
        vision | _SUPPORTED["vision_config"],
    )


def tensor_layouts(config: Qwen3VLConfig) -> dict[str, TensorLayout]:
    """Map the path of each parameter to its tensor."""
    return text_layouts(config.text, "model.language_model") | _vision_layouts(config)


def _vision_layouts(config: Qwen3VLConfig) -> dict[str, TensorLayout]:
    patch = "model.visual.patch_embed.proj"
    block = "model.visual.blocks.{}"
    linears = {
        "vision/blocks/qkv": f"{block}.attn.qkv",
        "vision/blocks/out": f"{block}.attn.proj",
        "vision/blocks/up": f"{block}.mlp.linear_fc1",
        "vision/blocks/down": f"{block}.mlp.linear_fc2",
    }
    norms = {f"vision/blocks/{name}": f"{block}.{name}" for name in ("norm1", "norm2")}
    mergers = {"vision/merger": "model.visual.merger"}
    if config.vision.levels:
        mergers["vision/deepstack"] = "model.visual.deepstack_merger_list.{}"
    for ours, theirs in mergers.items():
        linears[f"{ours}/fc1"] = f"{theirs}.linear_fc1"
        linears[f"{ours}/fc2"] = f"{theirs}.linear_fc2"
        norms[f"{ours}/norm"] = f"{theirs}.norm"
    table = {
        "vision/positions": TensorLayout("model.visual.pos_embed.weight"),
        "vision/patch/kernel": patch_layout(config.vision, f"{patch}.weight"),
        "vision/patch/bias": TensorLayout(f"{patch}.bias"),
    }
    table |= linear_layouts(linears)
    for ours, theirs in norms.items():
        table[f"{ours}/scale"] = TensorLayout(f"{theirs}.weight")
        table[f"{ours}/bias"] = TensorLayout(f"{theirs}.bias")
    return table


def vision_modules(config: Qwen3VLConfig) -> dict[str, list[str]]:
    """Map each trained part of the tower to its modules in transformers."""
    visual = "model.visual"
    # PEFT does not save a list of modules as a whole.
    deepstack = [f"{visual}.deepstack_merger_list.{level}" for level in range(config.vision.levels)]
    return {"merger": [f"{visual}.merger", *deepstack], "tower": [visual]}
