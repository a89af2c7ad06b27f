"""Estimates the memory of the engine's calls from its sizes, without compiling anything."""

from __future__ import annotations

import math

from models.attention import QUERY_CHUNK
from models.config import ModelConfig
from rollout.engine.programs import CHUNK
from rollout.engine.settings import EngineSizes


def prefill_bytes(
    config: ModelConfig, sizes: EngineSizes, item: int, token: float, length: int, before: int
) -> float:
    """Return the most bytes that a call of prefill takes.

    Args:
        config: the model's sizes.
        sizes: the engine's sizes.
        item: bytes of an activation.
        token: bytes of a token in the KV cache.
        length: tokens to prefill per row.
        before: upper bound on the cached tokens before them.
    """
    text = config.text
    rows = sizes.prefill_rows(length, before)
    tokens = rows * length
    # What a layer computes for all tokens, and hidden states that stay.
    layer = 3 * text.mlp_width + text.dispatched + 8 * text.hidden_size
    # The bank of visual vectors, two of them while it is filled, and one level at all tokens.
    bank = math.ceil(sizes.bank_tokens / CHUNK) * CHUNK
    vectors = (2 * bank * (1 + config.vision.levels) + tokens) * text.hidden_size * item
    scores = 2 * rows * min(QUERY_CHUNK, length) * text.num_attention_heads * (length + before) * 4
    cached = 2 * rows * before * token / text.num_hidden_layers
    return tokens * (layer * item + 3 * token) + vectors + scores + cached


def decode_bytes(
    config: ModelConfig, sizes: EngineSizes, token: float, width: int, paged: bool
) -> float:
    """Return the most bytes that a call of decoding takes.

    Args:
        config: the model's sizes.
        sizes: the engine's sizes.
        token: bytes of a token in the KV cache.
        width: upper bound on the tokens that a row reads.
        paged: whether decoding works on the pages of the KV cache themselves.
    """
    text = config.text
    rows = sizes.slots if paged else sizes.rows(width)
    logits = 4 * rows * text.vocab_size * 4
    # The pages are gathered and then split into keys and values.
    copies = 0.0 if paged else 3 * rows * (width + sizes.steps) * token
    scores = 2 * rows * text.num_attention_heads * (width + sizes.steps) * 4
    return logits + copies + scores
