"""Names of the tensors of Qwen3-VL in the Hugging Face layout."""

from __future__ import annotations

from models.qwen3_vl.config import Qwen3VLConfig
from models.weights.hf_layout import TensorLayout, linear_layouts, patch_layout, text_layouts


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
