"""Names of the tensors of Qwen2.5-VL in the Hugging Face layout."""

from __future__ import annotations

from models.qwen2_5_vl.config import Qwen25VLConfig
from models.weights.hf_layout import TensorLayout, linear_layouts, patch_layout, text_layouts

# Prefix of tensors -> of modules. Checkpoints keep the names of an earlier transformers.
MODULES = {"model.": "model.language_model.", "visual.": "model.visual."}


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
