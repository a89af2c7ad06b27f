"""Qwen2.5-VL as a `models.family.Family`."""

from __future__ import annotations

from models.family import Family
from models.qwen2_5_vl import sizes
from models.qwen2_5_vl.config import Qwen25VLConfig, Qwen25VLVisionConfig
from models.qwen2_5_vl.folder import MODULES, tensor_layouts
from models.qwen2_5_vl.vision import Qwen25VLVisionTower
from models.qwen3_vl.dialect import DIALECT

FAMILY = Family(
    title="Qwen2.5-VL",
    tower=Qwen25VLVisionTower,
    config=Qwen25VLConfig,
    vision=Qwen25VLVisionConfig,
    architecture="Qwen2_5_VLForConditionalGeneration",
    supported={
        "text_config": {"hidden_act": "silu", "use_sliding_window": False},
        "vision_config": {"hidden_act": "silu"},
    },
    decoder={"qk_norm": False, "attention_bias": True, "mrope_interleaved": False},
    # Those of transformers.
    defaults={"mrope_section": (16, 24, 24), "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5},
    experts=False,
    sizes=sizes.SIZES,
    tiny=sizes.tiny,
    tensor_layouts=tensor_layouts,
    modules=MODULES,
    dialect=DIALECT,
    processor={
        "processor": "Qwen2_5_VLProcessor",
        "image_processor": "Qwen2VLImageProcessor",
        "video_processor": "Qwen2VLVideoProcessor",
    },
    limited_frames=1,
)
