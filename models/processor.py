"""Converts chat messages with images to `Inputs`: ids, positions and patches, in NumPy.

The processor chooses the size of images, and inserts their placeholders into the text. Its results
equal those of transformers' processor token for token, from version 5.10 on. The frames of a video
are images, each after its time, as `paravt_jax.method.protocol` writes them.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageOps

from models.config import ModelConfig, VisionConfig
from models.family import family_of
from models.model import Inputs
from models.rope import mrope_positions, visual_index
from models.vision import patchify
from models.weights.folder import local_folder
from paravt_jax.data import foreign, media_files
from paravt_jax.data.frames import fit_size, resize
from paravt_jax.data.video import on_white


@dataclasses.dataclass(frozen=True)
class Processor:
    """Turns chat messages into `Inputs`, with the tokenizer and chat template of a model.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        config: the model's sizes and special tokens.
        limits: smallest and largest area of an image, in pixels.
    """

    tokenizer: Any
    config: ModelConfig
    limits: tuple[int, int]

    def __post_init__(self):
        known = self.tokenizer.convert_tokens_to_ids
        marks = family_of(self.config).dialect.visual.items()
        self.config.require_ids({field: known(mark) for field, mark in marks})

    @classmethod
    def load(cls, source: str | os.PathLike, config: ModelConfig) -> Processor:
        """Read tokenizer, chat template and settings from a local folder or a hub id.

        The settings are those of transformers 4.57 or 5.x.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: the settings do not fit `config`, or ask for something unsupported.
        """
        # The import takes seconds, and most users of this module do not need it.
        from transformers import AutoTokenizer

        folder = local_folder(source, weights=False)
        limits = _limits(_settings(folder), config.vision)
        # If one of these is missing, transformers silently falls back to defaults.
        for name in ("tokenizer.json", "tokenizer_config.json"):
            _require_file(folder, name)
        return cls(AutoTokenizer.from_pretrained(folder), config, limits)

    def __call__(
        self,
        messages: Iterable[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> Inputs:
        """Make the sample of a conversation.

        Args:
            messages: [{"role": ..., "content": ...}, ...], as in transformers. Content is a text,
                or a list of {"type": "text", "text": str} and
                {"type": "image", "image": uint8 [h, w, 3], a PIL image or a path}. Special tokens
                in a text become special tokens.
            tools: schemas of tools that the template offers to the model.
            add_generation_prompt: whether to end with the opening of the assistant's turn.

        Raises:
            ValueError: messages of another form, or images in a turn for which the template writes
                none.
        """
        bare, pictures = _separate(messages)
        images = [self._image(picture) for picture in pictures]
        text = self.tokenizer.apply_chat_template(
            bare, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        c, mark = self.config, family_of(self.config).dialect.image
        pieces = text.split(mark)
        if len(pieces) != len(images) + 1:
            raise ValueError(
                f"messages: {len(pieces) - 1} placeholders for {len(images)} images; write no "
                "placeholders, and give images to user and tool turns only"
            )
        merged = c.vision.spatial_merge_size**2
        for number, (_, grid) in enumerate(images):
            pieces[number] += mark * (math.prod(grid) // merged)
        ids = np.asarray(self.tokenizer("".join(pieces))["input_ids"], np.int32)
        grids = [grid for _, grid in images]
        # The empty array gives a sample without images the right shape.
        empty = np.zeros((0, c.vision.patch_dim), np.float32)
        patches = np.concatenate([empty, *(patches for patches, _ in images)])
        index = visual_index(ids, c.image_token_id).astype(np.int32)
        return Inputs(ids, mrope_positions(ids, grids, c), index, patches, grids)

    def _image(self, image: Any) -> tuple[Float[np.ndarray, "p c"], tuple[int, int]]:
        """Return the patches of an image, and its height and width in patches."""
        pixels, vision = _pixels(image), self.config.vision
        height, width, _ = pixels.shape
        factor = vision.patch_size * vision.spatial_merge_size
        # In contrast to the frames of episodes, transformers rounds a side below factor / 2 to 0:
        # the area is then 0, so the image is always enlarged.
        size = fit_size(height, width, self.limits, factor, least_side=0)
        (patches,) = patchify(resize(pixels, size)[None], vision)
        return patches, (size[0] // vision.patch_size, size[1] // vision.patch_size)


def _require_file(folder: Path, name: str) -> None:
    if not (folder / name).is_file():
        raise FileNotFoundError(
            f"{name}: not in {folder}; give the folder of a supported model with its tokenizer and "
            "processor"
        )


def _settings(folder: Path) -> Mapping[str, Any]:
    """Return the settings of the image processor."""
    # transformers 5 writes one file for all processors, 4.57 a file for each.
    joint = folder / "processor_config.json"
    if joint.is_file() and "image_processor" in (content := foreign.read_object(joint)):
        return content["image_processor"]
    _require_file(folder, "preprocessor_config.json")
    return foreign.read_object(folder / "preprocessor_config.json")


def _limits(settings: Mapping[str, Any], vision: VisionConfig) -> tuple[int, int]:
    """Return the area limits of a processor, in pixels. Its other settings must be the supported
    ones."""
    supported = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
        "image_mean": list(vision.pixel_mean),
        "image_std": list(vision.pixel_std),
    }
    for name, value in supported.items():
        if settings.get(name) != value:
            raise ValueError(
                f"image processor, {name} = {settings.get(name)}: only {value} is supported; give "
                "the folder of this model"
            )
    size = dict(settings.get("size") or {})
    # Older files have the limits under other names. As in transformers, those override.
    for name, older in {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}.items():
        if settings.get(older) is not None:
            size[name] = settings[older]
    if not {"shortest_edge", "longest_edge"} <= size.keys():
        raise ValueError(
            f"image processor, size = {size}: needs shortest_edge and longest_edge, in pixels; "
            "write both"
        )
    return size["shortest_edge"], size["longest_edge"]


def _separate(messages: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages without pixels, as the template wants them, and all images."""
    bare: list[dict[str, Any]] = []
    images: list[Any] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            for item in content:
                kind = item.get("type")
                if kind not in ("text", "image") or kind not in item:
                    raise ValueError(
                        f"messages: an item has {sorted(item)} of type {kind!r}; give a text or an "
                        "image under the type's own name, and the frames of a video as images"
                    )
            images += [item["image"] for item in content if item["type"] == "image"]
            items = [item if item["type"] == "text" else {"type": "image"} for item in content]
            message = {**message, "content": items}
        bare.append({**message})
    return bare, images


def _pixels(image: Any) -> UInt8[np.ndarray, "h w 3"]:
    """Return an image as an array: rotated as its EXIF data says, on a white background."""
    if isinstance(image, (str, os.PathLike)):
        with media_files.open_picture(image) as file:
            return _pixels(ImageOps.exif_transpose(file))
    if isinstance(image, Image.Image):
        return on_white(image)
    array = np.asarray(image)
    if array.ndim != 3 or array.dtype != np.uint8 or array.shape[-1] != 3:
        raise ValueError(
            f"image: {array.dtype} {list(array.shape)}; give RGB pixels, uint8 [height, width, 3]"
        )
    return array
