"""Qwen3-VL as a `models.family.Family`."""

from __future__ import annotations

from models.family import Family
from models.qwen3_vl import sizes
from models.qwen3_vl.config import Qwen3VLConfig, Qwen3VLVisionConfig
from models.qwen3_vl.dialect import DIALECT
from models.qwen3_vl.folder import tensor_layouts
from models.qwen3_vl.vision import Qwen3VLVisionTower

FAMILY = Family(
    title="Qwen3-VL",
    tower=Qwen3VLVisionTower,
    config=Qwen3VLConfig,
    vision=Qwen3VLVisionConfig,
    architecture="Qwen3VLForConditionalGeneration",
    supported={
        "text_config": {"hidden_act": "silu", "attention_bias": False},
        "vision_config": {"hidden_act": "gelu_pytorch_tanh"},
    },
    decoder={"qk_norm": True, "attention_bias": False, "mrope_interleaved": True},
    # Those of transformers.
    defaults={"mrope_section": (24, 20, 20), "rope_theta": 5_000_000.0, "head_dim": 128},
    experts=False,
    sizes=sizes.SIZES,
    tiny=sizes.tiny,
    tensor_layouts=tensor_layouts,
    modules={},
    dialect=DIALECT,
    processor={
        "processor": "Qwen3VLProcessor",
        "image_processor": "Qwen2VLImageProcessor",
        "video_processor": "Qwen3VLVideoProcessor",
    },
    # As many as its video_processor takes at most.
    limited_frames=768,
)
