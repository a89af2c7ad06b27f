"""Sizes of Qwen2.5-VL: the published models, one for rehearsals and a small one for laptops."""

from __future__ import annotations

import dataclasses

from models.config import TextConfig
from models.qwen2_5_vl.config import Qwen25VLConfig, Qwen25VLVisionConfig
from models.qwen3_vl.sizes import tiny_text

_TOWER = Qwen25VLVisionConfig(
    hidden_size=1280,
    depth=32,
    num_heads=16,
    intermediate_size=3420,
    out_hidden_size=3584,
    fullatt_block_indexes=(7, 15, 23, 31),
    tokens_per_second=2,
)
_TEXT = TextConfig(
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    head_dim=128,
    mrope_section=(16, 24, 24),
    rope_theta=1_000_000.0,
    tie_word_embeddings=False,
    qk_norm=False,
    attention_bias=True,
    mrope_interleaved=False,
    max_position_embeddings=128_000,
)


# hidden size, layers, heads, kv heads, MLP size, vocabulary, tied embeddings, MLP of the tower
_PUBLISHED = {
    "3b": (2048, 36, 16, 2, 11008, 151_936, True, 3420),
    "7b": (3584, 28, 28, 4, 18944, 152_064, False, 3420),
    "32b": (5120, 64, 40, 8, 27648, 152_064, False, 3456),
    "72b": (8192, 80, 64, 8, 29568, 152_064, False, 3456),
}


def qwen2_5_vl(size: str) -> Qwen25VLConfig:
    """Return the published model of `size`."""
    hidden, layers, heads, kv_heads, mlp, vocabulary, tied, tower_mlp = _PUBLISHED[size]
    text = dataclasses.replace(
        _TEXT,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
    )
    vision = dataclasses.replace(_TOWER, out_hidden_size=hidden, intermediate_size=tower_mlp)
    return Qwen25VLConfig(vision, text)


def _rehearsal() -> Qwen25VLConfig:
    """Return a narrow and shallow model with the vocabulary and the width of heads of the 7B model.

    It has fewer heads: all heads together are as wide as the hidden states.
    """
    small = tiny(_TEXT.vocab_size)
    text = dataclasses.replace(
        _TEXT,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    vision = dataclasses.replace(small.vision, out_hidden_size=256, window_size=112)
    return Qwen25VLConfig(vision, text)


def tiny(vocab_size: int) -> Qwen25VLConfig:
    """Return the laptop model: about 0.8 M parameters plus embeddings."""
    vision = dataclasses.replace(
        _TOWER,
        hidden_size=64,
        depth=2,
        num_heads=4,
        intermediate_size=128,
        out_hidden_size=128,
        window_size=28,
        fullatt_block_indexes=(1,),
    )
    return Qwen25VLConfig(vision, tiny_text(_TEXT, vocab_size, (4, 6, 6)))


SIZES = {**{size: qwen2_5_vl(size) for size in _PUBLISHED}, "rehearsal": _rehearsal()}
