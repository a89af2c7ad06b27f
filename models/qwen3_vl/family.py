"""Qwen3-VL as a `models.family.Family`."""

from __future__ import annotations

from models.family import Family
from models.qwen3_vl import sizes
from models.qwen3_vl.config import Qwen3VLConfig, Qwen3VLVisionConfig
from models.qwen3_vl.dialect import DIALECT
from models.qwen3_vl.vision import Qwen3VLVisionTower
from models.weights.hf_layout import TensorLayout, linear_layouts, patch_layout, text_layouts


def tensor_layouts(config: Qwen3VLConfig) -> dict[str, TensorLayout]:
    """Map the path of each parameter to its tensor."""
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
    table = text_layouts(config.text, "model.language_model") | {
        "vision/positions": TensorLayout("model.visual.pos_embed.weight"),
        "vision/patch/kernel": patch_layout(config.vision, f"{patch}.weight"),
        "vision/patch/bias": TensorLayout(f"{patch}.bias"),
        **linear_layouts(linears),
    }
    for ours, theirs in norms.items():
        table[f"{ours}/scale"] = TensorLayout(f"{theirs}.weight")
        table[f"{ours}/bias"] = TensorLayout(f"{theirs}.bias")
    return table


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
    dialect=DIALECT,
    processor={
        "processor": "Qwen3VLProcessor",
        "image_processor": "Qwen2VLImageProcessor",
        "video_processor": "Qwen3VLVideoProcessor",
    },
    # As many as its video_processor takes at most.
    limited_frames=768,
    timed_videos=True,
)
