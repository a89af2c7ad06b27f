"""Qwen2.5-VL as a `models.family.Family`."""

from __future__ import annotations

from models.family import Family
from models.qwen2_5_vl import folder, sizes
from models.qwen2_5_vl.vision import Qwen25VLVisionTower
from models.qwen3_vl.dialect import DIALECT

FAMILY = Family(
    title=folder.TITLE,
    tower=Qwen25VLVisionTower,
    sizes=sizes.SIZES,
    tiny=sizes.tiny,
    from_hf=folder.from_hf,
    to_hf=folder.to_hf,
    tensor_layouts=folder.tensor_layouts,
    modules=folder.MODULES,
    vision_modules=folder.vision_modules,
    dialect=DIALECT,
    processor={
        "processor": "Qwen2_5_VLProcessor",
        "image_processor": "Qwen2VLImageProcessor",
        "video_processor": "Qwen2VLVideoProcessor",
    },
)
