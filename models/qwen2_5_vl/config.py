"""Configuration of Qwen2.5-VL: what its vision tower has beyond the common fields."""

from __future__ import annotations

import dataclasses

from models.config import ModelConfig, VisionConfig, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen25VLVisionConfig(VisionConfig):
    """The vision tower, with the field names of Hugging Face.

    Layers in `fullatt_block_indexes` see whole frames, all others windows of `window_size` pixels a
    side. Only config.json needs `tokens_per_second`, the rate of a video's positions: the frames of
    a video are images here.
    """

    mlp_matrices = 3
    # Those of CLIP.
    pixel_mean = (0.48145466, 0.4578275, 0.40821073)
    pixel_std = (0.26862954, 0.26130258, 0.27577711)

    patch_size: int = 14
    window_size: int = 112
    fullatt_block_indexes: tuple[int, ...]
    tokens_per_second: int = 4

    def __post_init__(self):
        super().__post_init__()
        side = self.patch_size * self.spatial_merge_size
        require(
            self.window_size % side == 0,
            f"vision.window_size = {self.window_size}: a window has whole visual tokens; use a "
            f"multiple of {side}",
        )
        full = self.fullatt_block_indexes
        require(
            all(0 <= i < self.depth for i in full),
            f"vision.fullatt_block_indexes = {full}: the tower has {self.depth} layers; name some "
            "of them",
        )

    @property
    def window_patches(self) -> int:
        """Side of a window, in patches."""
        return self.window_size // self.patch_size


@dataclasses.dataclass(frozen=True)
class Qwen25VLConfig(ModelConfig):
    """A Qwen2.5-VL."""

    family = "qwen2_5_vl"
    vision: Qwen25VLVisionConfig

    def __post_init__(self):
        super().__post_init__()
        text = self.text
        heads = text.num_attention_heads
        require(
            heads * text.head_dim == text.hidden_size,
            f"text.head_dim = {text.head_dim}: all {heads} heads together are as wide as hidden "
            f"states ({text.hidden_size}); leave head_dim out of config.json, or change the others",
        )
