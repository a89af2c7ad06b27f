"""What an evaluation needs to know of a model that is only served: picture sizes and a tokenizer.

The server renders prompts, counts tokens and resizes pictures itself. If there is no tokenizer with
the markers of Qwen3-VL's chat format, a built-in vocabulary of single bytes keeps the books of an
episode; the server never sees it.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

from models.config import ModelConfig
from models.family import family
from paravt_jax.data import foreign
from paravt_jax.method import tokenizer
from paravt_jax.method.tokenizer import Vocabulary
from paravt_jax.world.vocabulary import build_tokenizer
from rollout.evaluation.settings import BenchmarkSettings

BYTES_PER_TOKEN = 16
"""Tokens of the built-in vocabulary per token of the server: most tokens are shorter, so that the
server's own limits act, not those of the books."""

BUILT_IN = "bytes"
"""Name of the built-in vocabulary in the record of an evaluation."""

_LIMITS = (
    "turn_tokens",
    "summary_tokens",
    "trajectory_tokens",
    "question_tokens",
    "subtitle_tokens",
)


@dataclasses.dataclass(frozen=True)
class Served:
    """The files of a served model, as far as there are any."""

    config: ModelConfig
    """Only patch size and merge size are used: frames have sides of their product."""
    vocabulary: Vocabulary
    tokenizer: str
    """`BUILT_IN`, or the digest of the model's own tokenizer."""

    @property
    def ids_per_token(self) -> int:
        """Upper bound on the ids in the books per token of the server."""
        return BYTES_PER_TOKEN if self.tokenizer == BUILT_IN else 1

    def scaled(self, settings: BenchmarkSettings) -> BenchmarkSettings:
        """The settings with token limits in the units of the books."""
        limits = {name: self.ids_per_token * getattr(settings, name) for name in _LIMITS}
        return dataclasses.replace(settings, **limits)


def served(folder: pathlib.Path | None) -> Served:
    """Read what there is of a served model.

    Args:
        folder: a folder with tokenizer.json, config.json, both or none of them; None for no folder.

    Raises:
        ValueError: a file is damaged.
    """
    vocabulary = _own_vocabulary(folder) if folder else None
    config = _picture_sizes(folder / "config.json" if folder else None)
    if vocabulary is None:
        return Served(config, Vocabulary(_built_in()), BUILT_IN)
    return Served(config, vocabulary, vocabulary.digest)


@functools.cache
def _built_in() -> Any:
    return build_tokenizer(())


def _own_vocabulary(folder: pathlib.Path) -> Vocabulary | None:
    """The tokenizer in a folder; None if there is none, or one of another chat format."""
    if not (folder / tokenizer.FILE).is_file():
        return None
    try:
        vocabulary = tokenizer.load(folder)
        needed = ("<|im_start|>", "<|vision_start|>", "<|image_pad|>", "</tool_call>")
        _ = [vocabulary[token] for token in needed]
    except KeyError:
        return None
    return vocabulary


def _picture_sizes(file: pathlib.Path | None) -> ModelConfig:
    """Sizes of a model, with the patch size and merge size of a config.json that has them."""
    sizes = family().size("8b")
    if file is None or not file.is_file():
        return sizes
    content = foreign.read_object(file, "download it again, or remove it")
    vision = content.get("vision_config")
    fields = ("patch_size", "spatial_merge_size", "temporal_patch_size")
    known = {name: vision[name] for name in fields if isinstance(vision, dict) and name in vision}
    if not all(type(value) is int and value > 0 for value in known.values()):
        return sizes
    return dataclasses.replace(sizes, vision=dataclasses.replace(sizes.vision, **known))
