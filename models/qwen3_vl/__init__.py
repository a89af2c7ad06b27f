"""Qwen3-VL: configuration, model, positions, generation, and weights in and out."""

from models.qwen3_vl.config import (
    Qwen3VLConfig,
    TextConfig,
    VisionConfig,
    flops_per_token,
    from_hf,
    qwen3_vl,
    tiny,
    vision_flops,
)
from models.qwen3_vl.generate import generate
from models.qwen3_vl.hf import load, save
from models.qwen3_vl.model import Inputs, Qwen3VL, abstract_model, num_params
from models.qwen3_vl.rope import mrope_positions, next_position
from models.qwen3_vl.text import KV
from models.qwen3_vl.vision import frame_layout, pack, packed_layout

__all__ = [
    "KV",
    "Inputs",
    "Qwen3VL",
    "Qwen3VLConfig",
    "TextConfig",
    "VisionConfig",
    "abstract_model",
    "flops_per_token",
    "frame_layout",
    "from_hf",
    "generate",
    "load",
    "mrope_positions",
    "next_position",
    "num_params",
    "pack",
    "packed_layout",
    "qwen3_vl",
    "save",
    "tiny",
    "vision_flops",
]
