"""What a model family provides. Everything outside its package is the same for all families.

A family is a package in `models` with a module `family`, whose `FAMILY` is a `Family`:

    models/NAME/family.py    FAMILY
    models/NAME/dialect.py   chat marks, and how a call is written
    models/NAME/config.py    fields of its vision tower
    models/NAME/vision.py    the vision tower
    models/NAME/folder.py    config.json, and the names of tensors
    models/NAME/sizes.py     the published sizes

The text decoder (`models.text`) is shared: families differ in fields of `TextConfig`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from models.config import ModelConfig
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
    sizes: Mapping[str, Callable[[], ModelConfig]]
    """The published sizes, and `rehearsal`: a narrow and shallow model with their vocabulary."""
    tiny: Callable[[int], ModelConfig]
    """From a vocabulary size to a model for laptops."""
    from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    """Reads the content of a config.json; ValueError if it lacks or sets something unsupported."""
    to_hf: Callable[[Any], dict[str, Any]]
    """The content of a config.json, which transformers reads back as the same model."""
    tensor_layouts: Callable[[Any], dict[str, Any]]
    """Path of each parameter -> the `TensorLayout` of its tensor, in the order of new files."""
    modules: Mapping[str, str]
    """Prefix of tensors' names -> prefix of their modules in transformers 5; empty if all agree."""
    vision_modules: Callable[[Any], Mapping[str, list[str]]]
    """Trained part of the tower (`merger` or `tower`) -> its modules in transformers 5."""
    dialect: Dialect
    """How it writes a conversation."""
    processor: Mapping[str, str]
    """Names of transformers' classes: processor, image_processor and video_processor."""

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
        return self.sizes[name]()


@functools.cache
def family(name: str = next(iter(FAMILIES))) -> Family:
    """Return the family called `name`, one of `FAMILIES`. It is imported on first use."""
    return importlib.import_module(FAMILIES[name]).FAMILY


def family_of(config: ModelConfig) -> Family:
    """Return the family of a model."""
    return family(config.family)
