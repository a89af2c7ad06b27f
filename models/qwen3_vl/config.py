"""Configuration of Qwen3-VL. `models.qwen3_vl.sizes` has those of the published models.

Equal configurations build the same parameters. A configuration that cannot be built raises a
ValueError.
"""

from __future__ import annotations

import dataclasses
import math


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _require_positive(name: str, config: VisionConfig | TextConfig) -> None:
    for field, value in vars(config).items():
        # Not isinstance: a bool is an int, and may be False.
        _require(
            type(value) is not int or value > 0,
            f"{name}.{field} = {value}: sizes and counts are positive; use 1 or more",
        )


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The vision tower, with the field names of Hugging Face.

    `num_position_embeddings` is the number of cells of a square position table, and
    `deepstack_visual_indexes` lists the layers whose output feeds DeepStack.
    """

    hidden_size: int
    depth: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    rope_theta: float = 10_000.0

    def __post_init__(self):
        _require_positive("vision", self)
        cells = self.num_position_embeddings
        side = math.isqrt(cells)
        _require(
            side * side == cells,
            f"vision.num_position_embeddings = {cells}: the position table is square; "
            f"use {side**2} or {(side + 1) ** 2}",
        )
        _require(
            self.hidden_size % (4 * self.num_heads) == 0,
            f"vision.hidden_size = {self.hidden_size}: head_dim is a multiple of 4 (2-D rotary); "
            f"use a multiple of {4 * self.num_heads}",
        )
        taps = self.deepstack_visual_indexes
        _require(
            all(0 <= i < self.depth for i in taps) and list(taps) == sorted(set(taps)),
            f"vision.deepstack_visual_indexes = {taps}: layers of the tower (depth {self.depth}) "
            "in rising order; name each once",
        )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Numbers in one flattened patch: channels x frames x height x width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def levels(self) -> int:
        """Number of DeepStack levels: feature maps that the first text layers get in addition."""
        return len(self.deepstack_visual_indexes)


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The text decoder, with the field names of Hugging Face.

    `mrope_section` divides the head_dim / 2 rotary frequencies among time, height and width.
    `max_position_embeddings` is the trained context in tokens. The model does not use it, but
    servers read it from config.json.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mrope_section: tuple[int, int, int]
    rope_theta: float
    tie_word_embeddings: bool
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 262_144

    def __post_init__(self):
        _require_positive("text", self)
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        _require(
            heads % kv_heads == 0,
            f"text.num_attention_heads = {heads}: every kv head serves the same number of heads; "
            f"use a multiple of num_key_value_heads = {kv_heads}",
        )
        _require(
            len(self.mrope_section) == 3 and 2 * sum(self.mrope_section) == self.head_dim,
            f"text.mrope_section = {self.mrope_section}: three counts; "
            f"make them add up to head_dim / 2 = {self.head_dim / 2:g}",
        )


@dataclasses.dataclass(frozen=True)
class Qwen3VLConfig:
    """Both towers, and the ids of the special tokens that the model reads."""

    vision: VisionConfig
    text: TextConfig
    image_token_id: int = 151_655
    video_token_id: int = 151_656
    vision_start_token_id: int = 151_652
    vision_end_token_id: int = 151_653

    def __post_init__(self):
        vision, text = self.vision, self.text
        _require(
            vision.out_hidden_size == text.hidden_size,
            f"vision.out_hidden_size = {vision.out_hidden_size}: visual vectors replace token "
            f"embeddings; use {text.hidden_size}",
        )
        _require(
            vision.levels <= text.num_hidden_layers,
            f"vision.deepstack_visual_indexes: {vision.levels} levels need a text layer each; "
            f"name at most {text.num_hidden_layers} layers",
        )
