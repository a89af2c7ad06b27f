"""Qwen3-VL as a `models.family.Family`."""

from __future__ import annotations

from models.family import Family
from models.qwen3_vl import folder, sizes
from models.qwen3_vl.dialect import DIALECT
from models.qwen3_vl.vision import Qwen3VLVisionTower

FAMILY = Family(
    title=folder.TITLE,
    tower=Qwen3VLVisionTower,
    sizes=sizes.SIZES,
    tiny=sizes.tiny,
    from_hf=folder.from_hf,
    to_hf=folder.to_hf,
    tensor_layouts=folder.tensor_layouts,
    modules={},
    vision_modules=folder.vision_modules,
    dialect=DIALECT,
    processor={
        "processor": "Qwen3VLProcessor",
        "image_processor": "Qwen2VLImageProcessor",
        "video_processor": "Qwen3VLVideoProcessor",
    },
)
