"""Sizes of Qwen3-VL: the published models, one for rehearsals and a small one for laptops."""

from __future__ import annotations

import dataclasses

from models.config import TextConfig
from models.qwen3_vl.config import Qwen3VLConfig, Qwen3VLVisionConfig

_LARGE_TOWER = Qwen3VLVisionConfig(
    hidden_size=1152,
    depth=27,
    num_heads=16,
    intermediate_size=4304,
    out_hidden_size=4096,
    num_position_embeddings=48 * 48,
    deepstack_visual_indexes=(8, 16, 24),
)
_SMALL_TOWER = dataclasses.replace(
    _LARGE_TOWER,
    hidden_size=1024,
    depth=24,
    intermediate_size=4096,
    deepstack_visual_indexes=(5, 11, 17),
)
_TEXT = TextConfig(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    mrope_section=(24, 20, 20),
    rope_theta=5_000_000.0,
    tie_word_embeddings=False,
)


# hidden size, layers, heads, MLP size, tied embeddings, tower
_PUBLISHED = {
    "2b": (2048, 28, 16, 6144, True, _SMALL_TOWER),
    "4b": (2560, 36, 32, 9728, True, _SMALL_TOWER),
    "8b": (4096, 36, 32, 12288, False, _LARGE_TOWER),
    "32b": (5120, 64, 64, 25600, False, _LARGE_TOWER),
}


def qwen3_vl(size: str) -> Qwen3VLConfig:
    """Return the published dense model of `size`."""
    hidden, layers, heads, mlp, tied, tower = _PUBLISHED[size]
    text = dataclasses.replace(
        _TEXT,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        tie_word_embeddings=tied,
    )
    return Qwen3VLConfig(dataclasses.replace(tower, out_hidden_size=hidden), text)


def _rehearsal() -> Qwen3VLConfig:
    """Return a narrow and shallow model with the vocabulary, heads and DeepStack levels of a large
    one.

    Numbers of heads and their width stay, because attention kernels and the tensor axis of a mesh
    depend on them.
    """
    vision = dataclasses.replace(
        tiny(_TEXT.vocab_size).vision,
        depth=3,
        out_hidden_size=64,
        num_position_embeddings=48 * 48,
        deepstack_visual_indexes=(0, 1, 2),
    )
    text = dataclasses.replace(
        _TEXT,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
    )
    return Qwen3VLConfig(vision, text)


def tiny(vocab_size: int) -> Qwen3VLConfig:
    """Return the laptop model: about 0.8 M parameters plus embeddings.

    It has every part of the published models, one DeepStack level and a position table of 2 x 2
    patches.
    """
    vision = dataclasses.replace(
        _LARGE_TOWER,
        hidden_size=64,
        depth=2,
        num_heads=4,
        intermediate_size=128,
        out_hidden_size=128,
        num_position_embeddings=4,
        deepstack_visual_indexes=(0,),
    )
    return Qwen3VLConfig(vision, tiny_text(_TEXT, vocab_size, (6, 5, 5)))


def tiny_text(
    published: TextConfig, vocab_size: int, mrope_section: tuple[int, int, int]
) -> TextConfig:
    """Return the decoder of a laptop model, of the kind of a published one."""
    return dataclasses.replace(
        published,
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        mrope_section=mrope_section,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
    )


SIZES = {**{size: qwen3_vl(size) for size in _PUBLISHED}, "rehearsal": _rehearsal()}
