"""Converts chat messages with images and videos to `Inputs`: ids, positions and patches, in NumPy.

The processor chooses the size of images and frames, and inserts their placeholders into the text.
It does not decode videos: they come as frames and times. Its results equal those of transformers'
processor token for token, from version 5.10 on. The patches of an image depend on that image alone,
so they can be cached.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Real, UInt8
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
from paravt_jax.method.tokenizer import Dialect


class _Visual(NamedTuple):
    """An image or a video as the model gets it."""

    text: str
    patches: Float[np.ndarray, "p c"]
    grid: tuple[int, int, int]
    slice_seconds: float = 1.0
    """Seconds from slice to slice."""


def video_frame_indices(
    frames: int, fps: float, sample_fps: float = 2.0, min_frames: int = 4, max_frames: int = 768
) -> Int[np.ndarray, " m"]:
    """Return the frames of a video that Qwen3-VL's processor takes: evenly spread, with both ends.

    Other families get frames from it, too; their own processors in transformers choose others.

    Args:
        frames: number of frames of the video.
        fps: its frame rate.
        sample_fps: frames to take per second.
        min_frames: lower bound on the frames to take, if the video has that many.
        max_frames: upper bound on the frames to take.

    Raises:
        ValueError: a video without frames or without a frame rate.
    """
    if frames < 1 or not 0 < fps < math.inf:
        raise ValueError(
            f"video: {frames} frames at {fps} per second; both are above 0: check the decoder"
        )
    count = min(max(int(frames / fps * sample_fps), min_frames), max_frames, frames)
    return np.linspace(0, frames - 1, count).round().astype(int)


def slice_times(times: Sequence[float] | Real[np.ndarray, " t"], temporal: int = 2) -> list[float]:
    """Return the time of each temporal slice, in seconds: the mean of its first and last frame's
    time.

    The last slice is padded by repeating the last frame.
    """
    padded = [float(time) for time in times]
    padded += padded[-1:] * (-len(padded) % temporal)
    return [(padded[i] + padded[i + temporal - 1]) / 2 for i in range(0, len(padded), temporal)]


@dataclasses.dataclass(frozen=True)
class Processor:
    """Turns chat messages into `Inputs`, with the tokenizer and chat template of a model.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        config: the model's sizes and special tokens.
        image_limits: smallest and largest area of an image, in pixels.
        video_limits: smallest and largest area of all frames of a video together, in pixels; of
            each frame, if the family counts time in positions (`VisionConfig.position_rate`). The
            limits of transformers' `cap_pixels_per_frame` are not applied.
    """

    tokenizer: Any
    config: ModelConfig
    image_limits: tuple[int, int]
    video_limits: tuple[int, int]

    def __post_init__(self):
        known = self.tokenizer.convert_tokens_to_ids
        marks = self._marks.visual.items()
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
        limits = {
            kind: _limits(kind, _settings(folder, kind), config.vision)
            for kind in ("image", "video")
        }
        # If one of these is missing, transformers silently falls back to defaults.
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (folder / name).is_file():
                raise FileNotFoundError(
                    f"{name}: not in {folder}; give the folder of a supported model with "
                    "its tokenizer"
                )
        return cls(AutoTokenizer.from_pretrained(folder), config, limits["image"], limits["video"])

    def __call__(
        self,
        messages: Iterable[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> Inputs:
        """Make the sample of a conversation.

        Args:
            messages: [{"role": ..., "content": ...}, ...], as in transformers. Content is a text,
                or a list of
                {"type": "text", "text": str},
                {"type": "image", "image": uint8 [h, w, 3], a PIL image or a path} and
                {"type": "video", "video": (uint8 [n, h, w, 3], n times in seconds), "fps": float}.
                `video_frame_indices` says which frames of a video to take. "fps" is optional: the
                rate of the given frames, for families that count time in positions. Special tokens
                in a text become special tokens.
            tools: schemas of tools that the template offers to the model.
            add_generation_prompt: whether to end with the opening of the assistant's turn.

        Raises:
            ValueError: messages of another form, or images and videos in a turn for which the
                template writes none.
        """
        bare, items = _separate(messages)
        visuals = [
            self._image(item["image"]) if item["type"] == "image" else self._video(item)
            for item in items
        ]
        text = self.tokenizer.apply_chat_template(
            bare, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        marks = self._marks
        # text, placeholder, text, placeholder, ..., text
        pieces = re.split(f"({re.escape(marks.image)}|{re.escape(marks.video)})", text)
        if pieces[1::2] != [getattr(marks, item["type"]) for item in items]:
            raise ValueError(
                f"messages: {len(pieces) // 2} placeholders for {len(items)} images and videos; "
                "write no placeholders, and give images and videos to user and tool turns only"
            )
        pieces[1::2] = [visual.text for visual in visuals]
        ids = np.asarray(self.tokenizer("".join(pieces))["input_ids"], np.int32)
        grids = [visual.grid for visual in visuals]
        # The empty array gives a sample without visuals the right shape.
        empty = np.zeros((0, self.config.vision.patch_dim), np.float32)
        patches = np.concatenate([empty, *(visual.patches for visual in visuals)])
        index = visual_index(ids, self.config.image_token_id, self.config.video_token_id)
        seconds = [visual.slice_seconds for visual in visuals]
        positions = mrope_positions(ids, grids, self.config, slice_seconds=seconds)
        return Inputs(ids, positions, index.astype(np.int32), patches, grids)

    def _image(self, image: Any) -> _Visual:
        pixels = _pixels(image)
        height, width, _ = pixels.shape
        size = image_size(height, width, self.image_limits, self._factor)
        patches, grid = self._patches(resize(pixels, size)[None], video=False)
        return _Visual(self._marks.image * self._tokens(grid), patches, grid)

    def _video(self, item: Mapping[str, Any]) -> _Visual:
        frames, times = _clip(item["video"])
        size = self._video_size(*frames.shape[:3])
        resized = np.stack([resize(frame, size) for frame in frames])
        patches, grid = self._patches(resized, video=True)
        temporal = self.config.vision.temporal_patch_size
        seconds = _slice_seconds(times, item.get("fps"), temporal)
        return _Visual(self._video_text(grid, times), patches, grid, seconds)

    def _video_size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) at which frames are shown."""
        vision = self.config.vision
        if vision.position_rate is not None:
            return image_size(height, width, self.video_limits, self._factor)
        temporal = vision.temporal_patch_size
        return video_size(frames, height, width, self.video_limits, self._factor, temporal)

    def _video_text(
        self, grid: tuple[int, int, int], times: Sequence[float] | Real[np.ndarray, " t"]
    ) -> str:
        """Return what replaces the placeholder of a video in the text."""
        vision, marks = self.config.vision, self._marks
        if vision.position_rate is not None:
            return marks.video * self._tokens(grid)
        # One block of placeholders per temporal slice, after the slice's time.
        placeholders = marks.video * (self._tokens(grid) // grid[0])
        block = marks.vision_start + placeholders + marks.vision_end
        shown = slice_times(times, vision.temporal_patch_size)
        return "".join(f"<{time:.1f} seconds>{block}" for time in shown)

    def _patches(
        self, frames: UInt8[np.ndarray, "t h w 3"], video: bool
    ) -> tuple[Float[np.ndarray, "p c"], tuple[int, int, int]]:
        c = self.config.vision
        patches = patchify(frames, c, video)
        grid = (len(patches), frames.shape[1] // c.patch_size, frames.shape[2] // c.patch_size)
        return patches.reshape(-1, c.patch_dim), grid

    def _tokens(self, grid: tuple[int, int, int]) -> int:
        """Return the number of visual tokens of a grid."""
        return math.prod(grid) // self.config.vision.spatial_merge_size**2

    @property
    def _marks(self) -> Dialect:
        return family_of(self.config).dialect

    @property
    def _factor(self) -> int:
        """Side of a visual token, in pixels."""
        return self.config.vision.patch_size * self.config.vision.spatial_merge_size


def _settings(folder: Path, kind: str) -> dict[str, Any]:
    """Return the settings of the "image" or "video" processor."""
    # transformers 5 writes one file for both, 4.57 a file for each.
    joint = folder / "processor_config.json"
    prefix = "video_" if kind == "video" else ""
    single = folder / f"{prefix}preprocessor_config.json"
    if joint.is_file():
        content = foreign.read_object(joint)
        if f"{kind}_processor" in content:
            return content[f"{kind}_processor"]
    if kind == "video" and not single.is_file():
        # Some families have one file for both.
        single = folder / "preprocessor_config.json"
    if not single.is_file():
        raise FileNotFoundError(
            f"{single.name}: not in {folder}, nor in a {joint.name} there; give the folder of a "
            "supported model"
        )
    return foreign.read_object(single)


def _limits(kind: str, settings: Mapping[str, Any], vision: VisionConfig) -> tuple[int, int]:
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
                f"{kind} processor, {name} = {settings.get(name)}: only {value} is supported; give "
                "the folder of this model"
            )
    size = dict(settings.get("size") or {})
    # Older files have the limits under other names. As in transformers, those override.
    for name, older in {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}.items():
        if settings.get(older) is not None:
            size[name] = settings[older]
    if not {"shortest_edge", "longest_edge"} <= size.keys():
        raise ValueError(
            f"{kind} processor, size = {size}: needs shortest_edge and longest_edge, in pixels; "
            "write both"
        )
    return size["shortest_edge"], size["longest_edge"]


def _separate(
    messages: Iterable[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]]]:
    """Return messages without pixels, as the template wants them, and all image and video items."""
    bare: list[dict[str, Any]] = []
    visuals: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            for item in content:
                _check_item(item)
            visuals += [item for item in content if item["type"] != "text"]
            items = [item if item["type"] == "text" else {"type": item["type"]} for item in content]
            message = {**message, "content": items}
        bare.append({**message})
    return bare, visuals


def _check_item(item: Mapping[str, Any]) -> None:
    kind = item.get("type")
    if kind not in ("text", "image", "video") or kind not in item:
        raise ValueError(
            f"messages: an item has {sorted(item)} of type {kind!r}; give a text, an image or a "
            "video under the type's own name"
        )


def _pixels(image: Any) -> UInt8[np.ndarray, "h w 3"]:
    """Return an image as an array: rotated as its EXIF data says, on a white background."""
    if isinstance(image, (str, os.PathLike)):
        with media_files.open_picture(image) as file:
            return _pixels(ImageOps.exif_transpose(file))
    if isinstance(image, Image.Image):
        return on_white(image)
    return _checked_rgb("image", image, 3)


def _slice_seconds(
    times: Sequence[float] | Real[np.ndarray, " t"], fps: float | None, temporal: int
) -> float:
    """Return the seconds from slice to slice of a video, where a slice has `temporal` frames.

    Without `fps`, they follow from the mean distance of the times. With it, they are those of
    transformers, if `fps` is its rate: frames given / frames in the file * rate of the file. Both
    are the same for frames at equal distances, if the file ends one distance after the last frame.
    Otherwise they differ slightly, and positions by one: of 100 frames at 25 per second,
    transformers takes 0, 12, 25, 37, 50, 62, 75, 87 and counts 1 second per slice; by their times
    it is 0.994.

    Raises:
        ValueError: the rate is not above 0, or not finite.
    """
    if fps is None:
        return float(temporal * (times[-1] - times[0]) / max(len(times) - 1, 1))
    if not 0 < fps < math.inf:
        raise ValueError(
            f"video: fps = {fps}; give the given frames per second, above 0, or leave it out"
        )
    return float(temporal / fps)


def _clip(
    video: tuple[Any, Any],
) -> tuple[UInt8[np.ndarray, "t h w 3"], Sequence[float] | Real[np.ndarray, " t"]]:
    """Return the checked frames and times of a video."""
    frames, times = _checked_rgb("video", video[0], 4), video[1]
    if not len(frames) or len(times) != len(frames) or not np.isfinite(times).all():
        raise ValueError(
            f"video: {len(times)} times for {len(frames)} frames; give one finite time in seconds "
            "per frame, and at least one frame"
        )
    return frames, times


def _checked_rgb(kind: str, pixels: Any, axes: int) -> Any:
    """Return pixels; ValueError unless they are RGB with this number of axes."""
    array = np.asarray(pixels)
    if array.ndim != axes or array.dtype != np.uint8 or array.shape[-1] != 3:
        raise ValueError(
            f"{kind}: {array.dtype} {list(array.shape)}; give RGB pixels, uint8 of {axes} axes "
            "(of a video: and their times, from paravt_jax.data.video or another reader)"
        )
    return array


def image_size(
    height: int, width: int, limits: tuple[int, int], factor: int = 32
) -> tuple[int, int]:
    """Return the (height, width) at which transformers' image processor shows an image.

    The result differs from `smart_resize` only if a side is below factor / 2. That side is rounded
    to 0, so the area is 0 and the image is always enlarged.

    Args:
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        limits: Smallest and largest area in pixels.
        factor: Pixels along the side of a merged patch.

    Raises:
        ValueError: As in `smart_resize`.
    """
    return fit_size(height, width, limits, factor, least_side=0)


def video_size(
    frames: int,
    height: int,
    width: int,
    limits: tuple[int, int],
    factor: int = 32,
    temporal: int = 2,
) -> tuple[int, int]:
    """Return the (height, width) at which transformers' video processor shows the frames.

    Args:
        frames: Number of frames.
        height: Height of a frame in pixels.
        width: Width of a frame in pixels.
        limits: Smallest and largest number of pixels of all frames together.
        factor: Pixels along the side of a merged patch. A smaller side is first enlarged to it.
        temporal: Frames per temporal patch.

    Raises:
        ValueError: There are fewer than `temporal` frames, or as in `smart_resize`.
    """
    if frames < temporal:
        raise ValueError(
            f"video: {frames} frames; give at least {temporal}, or a single frame as an image"
        )
    if 0 < min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height = int(height * scale)
        width = int(width * scale)
    # transformers rounds the number of frames to whole temporal patches when it compares with the
    # limits, but scales by the exact number.
    rounded = round(frames / temporal) * temporal
    return fit_size(height, width, limits, factor, least_side=0, frames=(frames, rounded))
