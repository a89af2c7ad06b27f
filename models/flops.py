"""Floating-point operations of the decoder. Only matrix products are counted."""

from __future__ import annotations

from models.config import ModelConfig


def flops_per_token(config: ModelConfig, context: float) -> float:
    """Return the forward FLOPs of the decoder and its head for one token that attends to `context`
    positions.

    The backward pass takes twice as many.
    """
    c = config.text
    # Weights per layer: q and o, k and v, and the three matrices of the MLP.
    heads = (2 * c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    router = 0 if c.experts is None else c.experts.num_experts
    layer = c.hidden_size * (heads + 3 * c.mlp_width + router)
    # q k^T and the weighted sum of v. Each takes head_dim products per query head and position.
    attention = 2 * c.num_attention_heads * c.head_dim * context
    # A multiplication and an addition per weight.
    return 2.0 * (c.num_hidden_layers * (layer + attention) + c.vocab_size * c.hidden_size)


def forward_flops(config: ModelConfig, tokens: float, with_logits: float, pairs: float) -> float:
    """Return the forward FLOPs of the decoder for a batch.

    Args:
        config: sizes of the model.
        tokens: tokens that go through the layers.
        with_logits: tokens that go through the head.
        pairs: pairs of a token and one that it attends to, itself included.
    """
    head = 2.0 * config.text.vocab_size * config.text.hidden_size
    layers = flops_per_token(config, 0.0) - head
    pair = flops_per_token(config, 1.0) - flops_per_token(config, 0.0)
    return tokens * layers + with_logits * head + pairs * pair
