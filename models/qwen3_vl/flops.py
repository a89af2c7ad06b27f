"""Floating-point operations of Qwen3-VL's two towers, counting matrix products only."""

from __future__ import annotations

from models.qwen3_vl.config import Qwen3VLConfig, VisionConfig


def flops_per_token(config: Qwen3VLConfig, context: float) -> float:
    """Forward FLOPs of the decoder and its head for one token that attends to `context` positions; the backward pass takes twice that."""
    c = config.text
    heads = (2 * c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    layer = c.hidden_size * (heads + 3 * c.intermediate_size)
    return 2.0 * (
        c.num_hidden_layers * (layer + 2 * c.num_attention_heads * c.head_dim * context)
        + c.vocab_size * c.hidden_size
    )


def vision_flops(config: VisionConfig, patches: int) -> float:
    """Forward FLOPs of the tower for one frame of `patches`."""
    c, merge = config, config.spatial_merge_size**2
    block = (
        4 * c.hidden_size**2 + 2 * c.hidden_size * c.intermediate_size + 2 * patches * c.hidden_size
    )
    merger = c.hidden_size * (merge * c.hidden_size + c.out_hidden_size)  # a patch's share of one
    return 2.0 * patches * (c.patch_dim * c.hidden_size + c.depth * block + (1 + c.levels) * merger)
