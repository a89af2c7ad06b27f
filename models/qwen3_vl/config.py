"""Configuration of Qwen3-VL: what its vision tower has beyond the common fields."""

from __future__ import annotations

import dataclasses
import math

from models.config import ModelConfig, VisionConfig, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3VLVisionConfig(VisionConfig):
    """The vision tower, with the field names of Hugging Face.

    `num_position_embeddings` is the number of cells of a square position table, and
    `deepstack_visual_indexes` lists the layers whose output feeds DeepStack.
    """

    mlp_matrices = 2
    pixel_mean = (0.5, 0.5, 0.5)
    pixel_std = (0.5, 0.5, 0.5)

    patch_size: int = 16
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]

    def __post_init__(self):
        super().__post_init__()
        cells = self.num_position_embeddings
        side = math.isqrt(cells)
        require(
            side * side == cells,
            f"vision.num_position_embeddings = {cells}: the position table is square; "
            f"use {side**2} or {(side + 1) ** 2}",
        )
        taps = self.deepstack_visual_indexes
        require(
            all(0 <= i < self.depth for i in taps) and list(taps) == sorted(set(taps)),
            f"vision.deepstack_visual_indexes = {taps}: layers of the tower (depth {self.depth}) "
            "in rising order; name each once",
        )

    @property
    def taps(self) -> tuple[int, ...]:
        return self.deepstack_visual_indexes


@dataclasses.dataclass(frozen=True)
class Qwen3VLConfig(ModelConfig):
    """A dense Qwen3-VL."""

    family = "qwen3_vl"
    vision: Qwen3VLVisionConfig
