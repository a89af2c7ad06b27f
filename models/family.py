"""What a model family provides. Everything outside its package is the same for all families.

A family is a package in `models` with a module `family`, whose `FAMILY` is a `Family`:

    models/NAME/family.py    FAMILY, and the names of tensors
    models/NAME/dialect.py   chat marks, and how a call is written
    models/NAME/config.py    fields of its vision tower
    models/NAME/vision.py    the vision tower
    models/NAME/sizes.py     the published sizes

The text decoder (`models.text`) is shared: families differ in fields of `TextConfig`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from models.config import ModelConfig, VisionConfig
from models.vision import VisionTower
from paravt_jax.method.tokenizer import Dialect

REHEARSAL = "rehearsal"
"""Name of a narrow and shallow size that every family has."""
FAMILIES = {name: f"models.{name}.family" for name in ("qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe")}
"""Modules of all families, by `model_type` in config.json; the first one is the default."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of vision-language models."""

    title: str
    """Its name in messages."""
    tower: Callable[..., VisionTower]
    """Its vision tower: `tower(config.vision, rngs=..., dtype=..., param_dtype=...)`."""
    config: type[ModelConfig]
    """Its sizes."""
    vision: type[VisionConfig]
    """Those of the tower: the fields of `vision_config` in config.json."""
    architecture: str
    """Its class in transformers."""
    supported: Mapping[str, Mapping[str, Any]]
    """`text_config` and `vision_config` -> field -> the only value with which this model runs."""
    decoder: Mapping[str, Any]
    """Fields of `TextConfig` that the family fixes, whatever config.json says."""
    defaults: Mapping[str, Any]
    """Fields of `TextConfig` that config.json may lack."""
    experts: bool
    """Whether every layer of the decoder has experts."""
    sizes: Mapping[str, ModelConfig]
    """The published sizes, and `rehearsal`: a narrow and shallow model with their vocabulary."""
    tiny: Callable[[int], ModelConfig]
    """From a vocabulary size to a model for laptops."""
    tensor_layouts: Callable[[Any], dict[str, Any]]
    """Path of each parameter -> the `TensorLayout` of its tensor, in the order of new files."""
    dialect: Dialect
    """How it writes a conversation."""
    processor: Mapping[str, str]
    """Names of transformers' classes: processor, image_processor and video_processor."""
    limited_frames: int
    """Frames of a video whose pixels its video_processor limits together; 1: each of them."""
    timed_videos: bool
    """Whether every two frames of a native video are marked with their time, as pictures are."""

    def size(self, name: str, vocab_size: int = 1) -> ModelConfig:
        """Return the sizes called `name`; `vocab_size` is that of `tiny`.

        Raises:
            ValueError: there is no such size.
        """
        if name == "tiny":
            return self.tiny(vocab_size)
        if name not in self.sizes:
            raise ValueError(
                f"model.size: {name!r} is no size of {self.title}; give one of "
                f"{', '.join(('tiny', *self.sizes))}"
            )
        return self.sizes[name]


@functools.cache
def family(name: str = next(iter(FAMILIES))) -> Family:
    """Return the family called `name`, one of `FAMILIES`. It is imported on first use."""
    return importlib.import_module(FAMILIES[name]).FAMILY


def family_of(config: ModelConfig) -> Family:
    """Return the family of a model."""
    return family(config.family)
