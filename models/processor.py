"""Chat messages with images and videos to `Inputs`: token ids, positions and patches, in NumPy.

The processor chooses the size of a picture, the frames of a video and the text that stands for
them. It does not decode videos: they come as frames and times. It equals the processor of
transformers (5.10 or later) token for token, and the patches of a still depend on the still alone,
so they may be cached.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Real, UInt8
from PIL import Image, ImageOps

from models.patches import patchify
from models.qwen3_vl.config import Qwen3VLConfig, VisionConfig
from models.qwen3_vl.model import Inputs
from models.qwen3_vl.rope import mrope_positions, visual_index
from models.weights.folder import local_folder
from paravt_jax.data.frames import resize
from paravt_jax.data.sizes import image_size, video_size
from paravt_jax.data.video import on_white

_TOKENS = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}


def video_frame_indices(
    frames: int, fps: float, sample_fps: float = 2.0, min_frames: int = 4, max_frames: int = 768
) -> Int[np.ndarray, " m"]:
    """Which frames of a video of `frames` frames at `fps` a second the official processor looks at: `sample_fps` a second, evenly spread.

    Both ends are in. At least `min_frames` where there are so many, at most `max_frames`. ValueError for a video without frames or rate.
    """
    if frames < 1 or not 0 < fps < math.inf:
        raise ValueError(
            f"video: {frames} frames at {fps} a second; both are above 0: check the decoder"
        )
    count = min(max(int(frames / fps * sample_fps), min_frames), max_frames, frames)
    return np.linspace(0, frames - 1, count).round().astype(int)


def slice_times(times: Sequence[float] | Real[np.ndarray, " t"], temporal: int = 2) -> list[float]:
    """The time of each temporal slice in seconds: the mean of its first and last frame's, the last frame filling up the last slice."""
    padded = [float(time) for time in times]
    padded += padded[-1:] * (-len(padded) % temporal)
    return [(padded[i] + padded[i + temporal - 1]) / 2 for i in range(0, len(padded), temporal)]


@dataclasses.dataclass(frozen=True)
class Processor:
    """Chat messages to `Inputs`, by the tokenizer and the chat template of a Hugging Face folder.

    `image_limits`: least and most pixels of an image; `video_limits`: of all frames of a video together.
    """

    tokenizer: Any  # a transformers tokenizer with a chat template
    config: Qwen3VLConfig
    image_limits: tuple[int, int]
    video_limits: tuple[int, int]

    def __post_init__(self):
        for name, text in _TOKENS.items():
            known, expected = (
                self.tokenizer.convert_tokens_to_ids(text),
                getattr(self.config, f"{name}_token_id"),
            )
            if known != expected:
                raise ValueError(
                    f"config.{name}_token_id = {expected}: {text} is {known} in the tokenizer; take both from one folder"
                )

    @classmethod
    def load(cls, source: str | os.PathLike, config: Qwen3VLConfig) -> Processor:
        """From a local folder or a hub id: tokenizer, chat template, and the processor's settings as transformers 4.57 or 5.x writes them.

        FileNotFoundError where settings are missing, ValueError where they do not fit `config` or ask for what is not computed.
        """
        from transformers import (
            AutoTokenizer,
        )  # takes seconds to import, and most users of this module do without

        folder = local_folder(source, weights=False)
        limits = {
            kind: _limits(kind, _settings(folder, kind), config.vision)
            for kind in ("image", "video")
        }
        for name in (
            "tokenizer.json",
            "tokenizer_config.json",
        ):  # without one, transformers makes up what stood in it
            if not (folder / name).is_file():
                raise FileNotFoundError(
                    f"{name}: not in {folder}; give the folder of a Qwen3-VL model with its tokenizer"
                )
        return cls(AutoTokenizer.from_pretrained(folder), config, limits["image"], limits["video"])

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> Inputs:
        """The sample that `messages` in the Hugging Face chat form make; `tools` are schemas that the template offers to the model.

        Content is a text or a list of {"type": "text", "text": str}, {"type": "image", "image": uint8 [h, w, 3], a PIL image or a path}
        and {"type": "video", "video": (uint8 [n, h, w, 3], n times in seconds)}; `video_frame_indices` tells which frames to take.
        Special tokens in texts are special, as in transformers. ValueError for what is none of these, and where the template leaves
        an image or a video out.
        """
        bare, visuals = _separate(messages)
        seen = [
            self._image(item["image"]) if item["type"] == "image" else self._video(item["video"])
            for item in visuals
        ]
        text = self.tokenizer.apply_chat_template(
            bare, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        pieces = re.split(f"({re.escape(_TOKENS['image'])}|{re.escape(_TOKENS['video'])})", text)
        if pieces[1::2] != [_TOKENS[item["type"]] for item in visuals]:
            counts = f"{len(pieces) // 2} placeholders for {len(visuals)} images and videos"
            raise ValueError(
                f"messages: {counts}; write no placeholders, and give images and videos to user and tool turns only"
            )
        pieces[1::2] = [text for text, _, _ in seen]
        ids = np.asarray(self.tokenizer("".join(pieces))["input_ids"], np.int32)
        grids = [grid for _, _, grid in seen]
        patches = [
            np.zeros((0, self.config.vision.patch_dim), np.float32),
            *(patches for _, patches, _ in seen),
        ]
        index = visual_index(ids, self.config.image_token_id, self.config.video_token_id)
        return Inputs(
            ids,
            mrope_positions(ids, grids, self.config),
            index.astype(np.int32),
            np.concatenate(patches),
            grids,
        )

    def _image(self, image: Any) -> tuple[str, np.ndarray, tuple[int, int, int]]:
        """Text, patches and grid of an image."""
        pixels = _pixels(image)
        height, width, _ = pixels.shape
        size = image_size(height, width, self.image_limits, self._factor)
        patches, grid = self._patches(resize(pixels, size)[None], video=False)
        return _TOKENS["image"] * self._tokens(grid), patches, grid

    def _video(self, video: Any) -> tuple[str, np.ndarray, tuple[int, int, int]]:
        """Text, patches and grid of a video; its slices stand in the text one after another, each after its time."""
        frames, times = _clip(video)
        temporal = self.config.vision.temporal_patch_size
        count, height, width, _ = frames.shape
        size = video_size(count, height, width, self.video_limits, self._factor, temporal)
        patches, grid = self._patches(
            np.stack([resize(frame, size) for frame in frames]), video=True
        )
        shown = (
            _TOKENS["vision_start"]
            + _TOKENS["video"] * (self._tokens(grid) // grid[0])
            + _TOKENS["vision_end"]
        )
        return (
            "".join(f"<{time:.1f} seconds>{shown}" for time in slice_times(times, temporal)),
            patches,
            grid,
        )

    def _patches(
        self, frames: UInt8[np.ndarray, "t h w 3"], video: bool
    ) -> tuple[Float[np.ndarray, "p c"], tuple[int, int, int]]:
        c = self.config.vision
        patches = patchify(frames, c.patch_size, c.spatial_merge_size, c.temporal_patch_size, video)
        grid = (len(patches), frames.shape[1] // c.patch_size, frames.shape[2] // c.patch_size)
        return patches.reshape(-1, c.patch_dim), grid

    def _tokens(self, grid: tuple[int, int, int]) -> int:
        return math.prod(grid) // self.config.vision.spatial_merge_size**2

    @property
    def _factor(self) -> int:
        return self.config.vision.patch_size * self.config.vision.spatial_merge_size


def _settings(folder: Path, kind: str) -> dict[str, Any]:
    """What the folder says of the image or the video processor: in the one file of transformers 5, or in a file of its own."""
    joint, own = (
        folder / "processor_config.json",
        folder / f"{'video_' * (kind == 'video')}preprocessor_config.json",
    )
    if joint.is_file() and f"{kind}_processor" in (
        content := json.loads(joint.read_text(encoding="utf-8"))
    ):
        return content[f"{kind}_processor"]
    if not own.is_file():
        raise FileNotFoundError(
            f"{own.name}: not in {folder}, nor in a {joint.name} there; give the folder of a Qwen3-VL model"
        )
    return json.loads(own.read_text(encoding="utf-8"))


def _limits(kind: str, settings: Mapping[str, Any], vision: VisionConfig) -> tuple[int, int]:
    """The limits in pixels that a processor's settings name, if for the rest it does what this module does."""
    computed = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    for name, value in (computed | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}).items():
        if settings.get(name) != value:
            raise ValueError(
                f"{kind} processor, {name} = {settings.get(name)}: {value} is computed here; give the folder of this model"
            )
    size = settings.get("size") or {}
    if not {"shortest_edge", "longest_edge"} <= size.keys():
        raise ValueError(
            f"{kind} processor, size = {size}: names shortest_edge and longest_edge, in pixels; write both"
        )
    return size["shortest_edge"], size["longest_edge"]


def _separate(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The messages without pixels, as the template wants them, and the images and videos in their order."""
    bare, visuals = [], []
    if isinstance(messages, (str, Mapping)) or not all(
        isinstance(message, Mapping) for message in messages
    ):
        raise ValueError(
            f'messages: {_describe(messages)}; give a list of {{"role": ..., "content": ...}}'
        )
    for message in messages:
        if isinstance(content := message.get("content"), (list, tuple)):
            for item in content:
                if not isinstance(item, Mapping):
                    raise ValueError(
                        f'messages: content holds a {_describe(item)}; give {{"type": "text", "text": ...}} and the like'
                    )
                if item.get("type") not in ("text", "image", "video") or item["type"] not in item:
                    found = f"{sorted(item)} of type {item.get('type')!r}"
                    raise ValueError(
                        f"messages: an item has {found}; give a text, an image or a video under the type's own name"
                    )
            visuals += [item for item in content if item["type"] != "text"]
            message = {
                **message,
                "content": [
                    item if item["type"] == "text" else {"type": item["type"]} for item in content
                ],
            }
        bare.append(message)
    return bare, visuals


def _pixels(image: Any) -> UInt8[np.ndarray, "h w 3"]:
    """An image as an array. A file is turned as it says; what is transparent stands on white."""
    if isinstance(image, (str, os.PathLike)):
        with Image.open(image) as file:
            return _pixels(ImageOps.exif_transpose(file))
    if isinstance(image, Image.Image):
        return on_white(image)
    if (
        not isinstance(image, np.ndarray)
        or image.dtype != np.uint8
        or image.ndim != 3
        or image.shape[2] != 3
    ):
        raise ValueError(
            f"image: {_describe(image)}; give uint8 [height, width, 3], a PIL image or a path"
        )
    return image


def _clip(video: Any) -> tuple[UInt8[np.ndarray, "t h w 3"], Sequence[float]]:
    """A video's frames and times, if they are what they should be."""
    if not isinstance(video, (tuple, list)) or len(video) != 2:
        raise ValueError(
            f"video: {_describe(video)}; give (frames, times in seconds), decoded by paravt_jax.data.video or any other reader"
        )
    frames, times = video
    if (
        not isinstance(frames, np.ndarray)
        or frames.dtype != np.uint8
        or frames.ndim != 4
        or frames.shape[3] != 3
    ):
        raise ValueError(
            f"video: frames are {_describe(frames)}; give uint8 [frames, height, width, 3]"
        )
    if len(times) != len(frames) or not np.isfinite(times).all():
        raise ValueError(
            f"video: {len(times)} times for {len(frames)} frames; give each frame its finite time in seconds"
        )
    return frames, times


def _describe(value: Any) -> str:
    return (
        f"{value.dtype} {list(value.shape)}"
        if isinstance(value, np.ndarray)
        else type(value).__name__
    )
