"""Qwen2.5-VL as a `models.family.Family`."""

from __future__ import annotations

from models.family import Family
from models.qwen2_5_vl import sizes
from models.qwen2_5_vl.config import Qwen25VLConfig, Qwen25VLVisionConfig
from models.qwen2_5_vl.vision import Qwen25VLVisionTower
from models.qwen3_vl.dialect import DIALECT
from models.weights.hf_layout import TensorLayout, linear_layouts, patch_layout, text_layouts


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
    dialect=DIALECT,
    processor={
        "processor": "Qwen2_5_VLProcessor",
        "image_processor": "Qwen2VLImageProcessor",
        "video_processor": "Qwen2VLVideoProcessor",
    },
    limited_frames=1,
    timed_videos=False,
)
