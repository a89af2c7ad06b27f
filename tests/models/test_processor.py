"""Frames to patches: the recorded resize rule, and patches that put the pixels where the tower expects them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from models.processor import patchify, resize, smart_resize


def test_smart_resize_equals_the_recorded_reference(golden):
    records = json.loads((golden / "frame_sampling.json").read_text())["smart_resize"]
    assert len(records) == 160
    for r in records:
        names = ("height", "width", "min_pixels", "max_pixels", "factor")
        arguments = {name: r[name] for name in names}
        if r["error"]:
            with pytest.raises(ValueError):
                smart_resize(**arguments)
        else:
            assert list(smart_resize(**arguments)) == r["resized"], r["id"]


@pytest.mark.parametrize(("size", "expected"), [((32, 32), (32, 32)), ((720, 1280), (160, 288)), ((10, 12), (32, 32))])
def test_smart_resize_of_known_frames(size, expected):
    assert smart_resize(size[0], size[1], 784, 50_176) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 5), "at least 1 pixel"), ((1, 201), "200 times"), ((64, 64, 5000, 4000), "max_pixels = 4000: at least min_pixels = 5000")],
)
def test_smart_resize_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        smart_resize(*arguments)


def test_resize_keeps_a_frame_that_fits_and_a_flat_colour():
    frame = np.full((20, 30, 3), 77, np.uint8)
    assert resize(frame, (20, 30)) is frame
    assert resize(frame, (32, 64)).shape == (32, 64, 3) and (resize(frame, (32, 64)) == 77).all()


def test_patches_hold_the_pixels_of_their_place_twice():
    frames = np.random.default_rng(0).integers(0, 256, (2, 8, 12, 3), np.uint8)
    patches = patchify(frames, patch=2, merge=2, temporal=2)
    assert patches.shape == (2, 24, 24) and patches.dtype == np.float32
    cells = [(y, x) for by in range(2) for bx in range(3) for y in (2 * by, 2 * by + 1) for x in (2 * bx, 2 * bx + 1)]
    for number, (y, x) in enumerate(cells):
        pixels = frames[1, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].transpose(2, 0, 1) / 127.5 - 1
        for time in range(2):
            np.testing.assert_allclose(patches[1, number].reshape(3, 2, 2, 2)[:, time], pixels, atol=1e-6)
    assert patches.min() >= -1 and patches.max() <= 1


def test_a_frame_off_the_grid_is_refused():
    with pytest.raises(ValueError, match="30 x 32: both sides are multiples of 32"):
        patchify(np.zeros((1, 30, 32, 3), np.uint8))
