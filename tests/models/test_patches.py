"""Patches of frames and pictures against the image processors of transformers, for each family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from models.config import VisionConfig
from models.family import FAMILIES, family
from models.vision import patchify
from paravt_jax.data.frames import PixelRules, resize

LEVEL = 1e-4  # of 255; both sides resize with Pillow
# Of the first, neither side changes. The second is narrower than a visual token.
SIZES = ((224, 448), (40, 2100), (301, 200), (900, 300), (30, 50))


def rules(vision: VisionConfig) -> PixelRules:
    factor = vision.patch_size * vision.spatial_merge_size
    return PixelRules(min_pixels=64 * 64, max_pixels=512 * 512, factor=factor)


def theirs(vision: VisionConfig, picture: np.ndarray) -> Any:
    """What transformers makes of a picture: its patches, and their grid."""
    limits = rules(vision)
    processor = Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        image_mean=list(vision.pixel_mean),
        image_std=list(vision.pixel_std),
        size={"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels},
    )
    return processor(images=[picture], return_tensors="np", input_data_format="channels_last")


def difference(name: str) -> float:
    """The largest difference of a value, in levels of 255 of the channel that varies least."""
    vision = family(name).size("rehearsal").vision
    found = []
    for number, size in enumerate(SIZES):
        picture = np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)
        answer = theirs(vision, picture)
        height, width = rules(vision).size(*size)
        grid = [1, height // vision.patch_size, width // vision.patch_size]
        assert answer["image_grid_thw"].tolist() == [grid]
        (patches,) = patchify(resize(picture, (height, width))[None], vision)
        found.append(np.abs(patches - answer["pixel_values"]).max() * 255 * min(vision.pixel_std))
    return float(max(found))


@pytest.mark.parametrize("name", FAMILIES)
def test_patches_are_those_of_transformers(name):
    assert difference(name) <= LEVEL


def test_a_frame_off_the_grid_is_refused():
    vision = family("qwen3_vl").size("8b").vision
    with pytest.raises(ValueError, match="30 x 32: .*multiples of 32"):
        patchify(np.zeros((1, 30, 32, 3), np.uint8), vision)


def test_frames_that_share_a_patch_are_its_times():
    """The patches of a pair have those of each frame alone at its time."""
    vision = family("qwen3_vl").sizes["rehearsal"].vision
    frames = np.random.default_rng(0).integers(0, 256, (4, 32, 64, 3), np.uint8)
    shape = (-1, vision.in_channels, vision.temporal_patch_size, vision.patch_size**2)
    pairs = patchify(frames, vision, together=2)
    assert len(pairs) == 2
    alone = patchify(frames, vision)
    for number, patches in enumerate(alone):
        pair = pairs[number // 2].reshape(shape)
        np.testing.assert_array_equal(pair[:, :, number % 2], patches.reshape(shape)[:, :, 0])
