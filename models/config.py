"""Sizes of a vision-language model: a vision tower and a text decoder.

A family (`models.family`) adds the fields of its own tower. Equal configurations build the same
parameters. A configuration that cannot be built raises a ValueError.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar


def require(holds: bool, message: str) -> None:
    """Raise ValueError with `message` unless `holds`."""
    if not holds:
        raise ValueError(message)


def _require_positive(name: str, config: Any) -> None:
    for field, value in vars(config).items():
        # Not isinstance: a bool is an int, and may be False.
        require(
            type(value) is not int or value > 0,
            f"{name}.{field} = {value}: sizes and counts are positive; use 1 or more",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """What the towers of all families have, with the field names of Hugging Face."""

    mlp_matrices: ClassVar[int]
    """Matrices of a block's MLP, each between the hidden and the intermediate size."""
    pixel_mean: ClassVar[tuple[float, float, float]]
    """Subtracted from red, green and blue, which run from 0 to 1."""
    pixel_std: ClassVar[tuple[float, float, float]]
    """Red, green and blue are divided by it afterwards."""

    hidden_size: int
    depth: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    patch_size: int
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    rope_theta: float = 10_000.0

    def __post_init__(self):
        _require_positive("vision", self)
        require(
            self.hidden_size % (4 * self.num_heads) == 0,
            f"vision.hidden_size = {self.hidden_size}: head_dim is a multiple of 4 (2-D rotary); "
            f"use a multiple of {4 * self.num_heads}",
        )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Numbers in one flattened patch: channels x frames x height x width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose output feeds DeepStack, in rising order."""
        return ()

    @property
    def levels(self) -> int:
        """Number of DeepStack levels: feature maps that the first text layers get in addition."""
        return len(self.taps)


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in every layer, with the field names of Hugging Face."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int

    def __post_init__(self):
        _require_positive("text.experts", self)
        require(
            self.num_experts_per_tok <= self.num_experts,
            f"text.num_experts_per_tok = {self.num_experts_per_tok}: a token uses some of the "
            f"experts; use at most num_experts = {self.num_experts}",
        )


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The text decoder, with the field names of Hugging Face.

    `mrope_section` divides the head_dim / 2 rotary frequencies among time, height and width; they
    alternate if `mrope_interleaved`, and otherwise follow each other. `qk_norm`: queries and keys
    are normed per head. `attention_bias`: queries, keys and values have biases. `experts` replace
    the MLP. `layer_types` is the pattern of the layers, so far of one kind for all of them; kinds
    are those of `models.text.LAYER_KINDS`.
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
    qk_norm: bool = True
    attention_bias: bool = False
    mrope_interleaved: bool = True
    max_position_embeddings: int = 262_144
    experts: ExpertsConfig | None = None
    layer_types: tuple[str, ...] = ("full_attention",)

    def __post_init__(self):
        _require_positive("text", self)
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        require(
            heads % kv_heads == 0,
            f"text.num_attention_heads = {heads}: every kv head serves the same number of heads; "
            f"use a multiple of num_key_value_heads = {kv_heads}",
        )
        require(
            len(self.mrope_section) == 3 and 2 * sum(self.mrope_section) == self.head_dim,
            f"text.mrope_section = {self.mrope_section}: three counts; "
            f"make them add up to head_dim / 2 = {self.head_dim / 2:g}",
        )

    @property
    def most_tensor(self) -> int:
        """The number of devices that can share heads, kv heads, MLP or experts, and vocabulary.

        Every divisor of it can, too.
        """
        mlp = self.intermediate_size if self.experts is None else self.experts.num_experts
        return math.gcd(self.num_attention_heads, self.num_key_value_heads, mlp, self.vocab_size)

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP; with experts, of all experts that a token uses."""
        if self.experts is None:
            return self.intermediate_size
        return self.experts.num_experts_per_tok * self.experts.moe_intermediate_size


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Both towers, and the ids of the special tokens that the model reads.

    Every family has a subclass.
    """

    family: ClassVar[str]
    """Its `model_type` in config.json, and its package in `models`."""

    vision: VisionConfig
    text: TextConfig
    image_token_id: int = 151_655
    video_token_id: int = 151_656
    vision_start_token_id: int = 151_652
    vision_end_token_id: int = 151_653

    def __post_init__(self):
        vision, text = self.vision, self.text
        require(
            vision.out_hidden_size == text.hidden_size,
            f"vision.out_hidden_size = {vision.out_hidden_size}: visual vectors replace token "
            f"embeddings; use {text.hidden_size}",
        )
        require(
            vision.levels <= text.num_hidden_layers,
            f"vision: {vision.levels} DeepStack levels need a text layer each; "
            f"tap at most {text.num_hidden_layers} layers",
        )
